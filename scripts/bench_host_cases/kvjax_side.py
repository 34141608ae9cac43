"""kvjax's side of the cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np

from bench_host_cases.shapes import BLOCK_SIZE, FULL, VOCABULARY, WARM_UP_STEPS, Shape
from kvjax.core import BlockHasher, KVCacheConfig, KVCacheManager, KVCacheSpec, Request
from kvjax.core.pool.block_pool import BlockPool


def random_tokens(name: str, num_tokens: int) -> np.ndarray:
    """int32[num_tokens], the same for every call with a name."""
    return np.random.default_rng(crc32(name.encode())).integers(0, VOCABULARY, num_tokens).astype(np.int32)


class KvjaxSide:
    """As `Side`."""

    def manager(
        self, specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int, eviction_policy: str = "probation"
    ) -> KVCacheManager:
        config = KVCacheConfig.single_pool(num_blocks, *specs)
        return KVCacheManager(config, max_model_len, BLOCK_SIZE, max_num_reqs=256, eviction_policy=eviction_policy)

    def request(self, name: str, num_tokens: int) -> Request:
        hasher = BlockHasher(BLOCK_SIZE, seed="bench")
        return Request(name, random_tokens(name, num_tokens), block_hasher=hasher)

    def decoding(self, shape: Shape, num_requests: int) -> Decoding:
        return Decoding(shape, num_requests)

    def decode_calls(self, manager: KVCacheManager, running: list[Request]) -> list[Callable[[], object]]:
        rows, table = np.array([request.row for request in running]), manager.request_table
        return [
            lambda: table.append_tokens(rows, np.zeros(rows.size, np.int32)),
            lambda: manager.plan_step(rows, 1),
        ]

    def pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(num_blocks)

    def register(self, pool: BlockPool, blocks: np.ndarray, hashes: list[bytes]) -> None:
        pool.register_many(blocks, hashes, 0)

    def hashing(self, algorithm: str, num_tokens: int) -> Callable[[], list[bytes]]:
        hasher, tokens = BlockHasher(BLOCK_SIZE, algorithm, seed="bench"), random_tokens("hashed", num_tokens)
        return lambda: hasher.hash_tokens(tokens)


class Decoding:
    """`num_requests` requests past their prompts, with a block hash per full block. A step plans all rows at once."""

    def __init__(self, shape: Shape, num_requests: int) -> None:
        hasher = BlockHasher(shape.hash_block_size, seed="bench")
        self.rng = np.random.default_rng(0)
        self.manager = KVCacheManager(
            shape.config(num_requests),
            shape.most_tokens + 1,
            shape.hash_block_size,
            max_num_reqs=num_requests,
        )
        self.requests = []
        for i in range(num_requests):
            tokens = self.rng.integers(0, VOCABULARY, shape.prompt + i % shape.spread).astype(np.int32)
            request = Request(f"r{i}", tokens, block_hasher=hasher)
            options = {"delay_cache_blocks": True, "num_encoder_tokens": shape.num_encoder_tokens}
            if self.manager.allocate_slots(request, tokens.size, **options) is None:
                raise AssertionError("the pool is too small")
            request.num_computed_tokens = tokens.size
            self.manager.remove_skipped_blocks(request.request_id, tokens.size)
            self.manager.cache_blocks(request, tokens.size)
            self.requests.append(request)
        self.rows = np.array([request.row for request in self.requests])
        self.table = self.manager.request_table
        self.append()
        for _ in range(WARM_UP_STEPS - 1):
            self.step()
            self.next_step()
        self.step()

    def next_step(self) -> None:
        """The tokens of the step before are computed, and each request has another one."""
        self.advance()
        self.append()

    def append(self) -> None:
        self.table.append_tokens(self.rows, self.tokens())

    def tokens(self) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, self.rows.size).astype(np.int32)

    def step(self) -> None:
        if self.manager.plan_step(self.rows, 1).num_planned != self.rows.size:
            raise AssertionError("a row did not fit")

    def advance(self, num_tokens: int = 1) -> None:
        self.table.advance(self.rows, num_tokens)

    def step_by_calls(self) -> None:
        """The same by a call for each request."""
        allocate = self.manager.allocate_slots
        for request in self.requests:
            allocate(request, 1)

    def step_with_tokens(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """A step that appends and hashes tokens too, and what comes before it."""
        drawn: list[np.ndarray] = []

        def draw() -> None:
            self.advance()
            drawn.append(self.tokens())

        def step() -> None:
            self.table.append_tokens(self.rows, drawn.pop())
            self.step()

        return step, draw

    def cache_free_blocks(self) -> None:
        """Makes every free block hold a cached one of a request that ended."""
        size, pool, fillers = FULL.block_size, self.manager.block_pools[0], []
        while pool.num_free_blocks:
            num_tokens = min(pool.num_free_blocks * size, self.manager.max_model_len // size * size)
            tokens = self.rng.integers(0, VOCABULARY, num_tokens).astype(np.int32)
            fillers.append(Request(f"filler{len(fillers)}", tokens, block_hasher=self.requests[0].block_hasher))
            self.manager.allocate_slots(fillers[-1], num_tokens)
        for filler in fillers:
            self.manager.free(filler)
