"""A manager of one kind and random calls of it, each checked: what the contract suite is driven by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import BlockHasher, KVCacheConfig, KVCacheManager, KVCacheSpec, Request, SingleTypeKVCacheManager

MAX_MODEL_LEN = 32
HASH_BLOCK_SIZE = 2
HASHER = BlockHasher(HASH_BLOCK_SIZE, "xxhash_cbor", seed="0")


@dataclass
class World:
    """A manager of `num_groups` groups of one kind, and random calls of it."""

    spec: KVCacheSpec
    seed: int
    num_groups: int = 1
    num_blocks: int = 40
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = KVCacheConfig.single_pool(self.num_blocks, *[self.spec] * self.num_groups)
        self.manager = KVCacheManager(config, MAX_MODEL_LEN, HASH_BLOCK_SIZE, **self.options)
        self.rng = np.random.default_rng(self.seed)
        self.trunk = self.rng.integers(0, 2, MAX_MODEL_LEN)
        self.running: list[Request] = []
        self.num_requests = 0

    @property
    def kind(self) -> SingleTypeKVCacheManager:
        [kind] = self.manager.groups.managers
        return kind

    @property
    def num_free(self) -> int:
        return self.manager.block_pool.num_free_blocks

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def pick(self) -> Request:
        return self.running[self.some(0, len(self.running) - 1)]

    def step_of(self, request: Request, new: int, num_hit: int = 0) -> int:
        """As many new tokens as one step may take; one it always may."""
        return max(self.manager.limit_step(request, new, num_hit), 1)

    def new_request(self) -> Request:
        self.num_requests += 1
        prompt = self.trunk[: self.some(1, MAX_MODEL_LEN)].copy()
        prompt[-self.some(1, 3) :] = self.some(0, 1)
        return Request(f"r{self.num_requests}", prompt, cache_salt="s", block_hasher=HASHER)

    def admit(self, **options: Any) -> int | None:
        """The blocks that it took from the free ones, or None: refused. Checks need and refusal."""
        request = self.new_request()
        hit, length = self.manager.get_computed_blocks(request)
        new = self.step_of(request, self.some(1, request.num_tokens - length), length)
        encoder = self.some(0, 7) if self.kind.reads_encoder else 0
        after, lookahead = length + new, self.some(0, 3)
        slots = min(after + lookahead, MAX_MODEL_LEN)
        [needed] = self.manager.block_needs.of_new(slots, hit.block_ids, length, False, encoder, after)
        before, num_free = self.manager.snapshot(), self.num_free
        options |= {"num_lookahead_tokens": lookahead, "num_encoder_tokens": encoder}
        if self.manager.allocate_slots(request, new, length, hit, **options) is None:
            assert needed > num_free
            assert self.manager.snapshot() == before
            return None
        assert num_free - self.num_free == needed
        request.num_computed_tokens = after
        self.running.append(request)
        return needed

    def step(self) -> int | None:
        """One step of one running request, after its release: what it took, or None."""
        request = self.pick()
        room = MAX_MODEL_LEN - request.num_computed_tokens
        if not room:
            return None
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([self.some(0, 1)] * min(self.some(1, 3), room))
        left = request.num_tokens - request.num_computed_tokens
        new, lookahead = self.step_of(request, min(self.some(1, 3), left)), self.some(0, 2)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        after = request.num_computed_tokens + new
        slots = min(after + lookahead, MAX_MODEL_LEN)
        [needed] = self.manager.block_needs.of_running(request.row, slots, num_tokens=after)
        before, num_free = self.manager.snapshot(), self.num_free
        if self.manager.allocate_slots(request, new, num_lookahead_tokens=lookahead) is None:
            assert needed > num_free
            assert self.manager.snapshot() == before
            return None
        assert num_free - self.num_free == needed
        request.num_computed_tokens += new
        return needed

    def leave(self) -> None:
        request = self.pick()
        self.running.remove(request)
        self.manager.free(request)

    def live(self, num_calls: int) -> None:
        """Random admissions, steps, ends, evictions and new steps."""
        for _ in range(num_calls):
            call = self.rng.choice(["admit", "step", "step", "leave", "evict", "new_step"])
            if call == "admit":
                self.admit()
            elif call == "evict":
                self.manager.evict_blocks(self.rng.integers(0, self.num_blocks, 2))
            elif call == "new_step":
                self.manager.new_step_starts()
            elif self.running:
                self.step() if call == "step" else self.leave()
            self.manager.check_invariants()

    def columns(self, request: Request) -> np.ndarray:
        """int32[G, columns] the request's part of the tables."""
        return self.kind.row_block_ids(request.row)
