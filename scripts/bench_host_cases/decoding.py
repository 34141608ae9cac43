"""Cases of decoding steps: every kind of attention alone, and models of several groups.

Request i starts from `prompt + i mod spread` tokens, so that every step fills blocks of some requests; spread is the
largest block size. Prompts reach past the windows that release; the samples are whole steps. The baseline is
`PlainManager`, called once per request, with a window of two tokens for recurrent states. In the case `evicting` every
free block is cached, so that each new block evicts one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from bench_host_cases.case import BenchCase, collector_off, sample_us, time_us
from bench_host_cases.plain_manager import PlainCrossManager, PlainGroup, PlainManager, PlainRequest
from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCachePoolSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

NUM_STEPS = 64
WARM_UP_STEPS = 2
VOCABULARY = 150_000
NUM_ENCODER_TOKENS = 1_500  # 30 s of audio
HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
SLIDING = SlidingWindowSpec(sliding_window=1_024, **HEADS)
CROSS = CrossAttentionSpec(
    block_size=16, num_kv_heads=20, head_size=64, dtype="bfloat16", max_num_encoder_tokens=NUM_ENCODER_TOKENS
)
STATE = MambaSpec(
    block_size=16, shapes=((3, 8_192), (8_192, 16)), dtypes=("bfloat16", "float32"), mamba_cache_mode="align"
)


def latent_window(block_size: int, window: int, **options: Any) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size=block_size, sliding_window=window, **options)


DEEPSEEK_V4 = (
    MLAAttentionSpec(block_size=256, head_size=512, dtype="bfloat16", tokens_per_state=4),
    latent_window(64, 128, head_size=512, dtype="bfloat16"),
    latent_window(4, 8, head_size=2_048, dtype="float32"),  # states of the compressor of ratio 4
    latent_window(8, 128, head_size=1_024, dtype="float32"),  # and of ratio 128
)


@dataclass(frozen=True)
class Shape:
    """Groups, in one pool or in one each, and the tokens that requests start from."""

    specs: tuple[KVCacheSpec, ...]
    prompt: int = 1_024
    pools_apart: bool = False

    @property
    def spread(self) -> int:
        return max(spec.block_size for spec in self.specs)

    @property
    def hash_block_size(self) -> int:
        return gcd(*(spec.block_size for spec in self.specs))

    @property
    def most_tokens(self) -> int:
        return self.prompt + self.spread + WARM_UP_STEPS + NUM_STEPS

    @property
    def num_encoder_tokens(self) -> int:
        return NUM_ENCODER_TOKENS if any(isinstance(spec, CrossAttentionSpec) for spec in self.specs) else 0

    def config(self, num_requests: int) -> KVCacheConfig:
        """Pools so large that no step of a case evicts a cached block: those are the pool's cases."""
        sizes = self._pool_sizes(num_requests)
        if not self.pools_apart:
            return KVCacheConfig.single_pool(sum(sizes), *self.specs)
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec, pool_id=i) for i, spec in enumerate(self.specs))
        return KVCacheConfig(tuple(KVCachePoolSpec(size) for size in sizes), groups)

    def _pool_sizes(self, num_requests: int) -> list[int]:
        """Per group, the null block and a sink included."""
        return [
            2 + num_requests * self._blocks_of_request(spec) + self.most_tokens // spec.block_size
            for spec in self.specs
        ]

    def _blocks_of_request(self, spec: KVCacheSpec) -> int:
        if isinstance(spec, CrossAttentionSpec):
            return -(-NUM_ENCODER_TOKENS // spec.block_size)
        seen = min(window_of(spec) or self.prompt, self.prompt)
        return (seen + self.spread + WARM_UP_STEPS + NUM_STEPS) // spec.block_size + 3

    def plain_manager(self, num_requests: int) -> PlainManager:
        """Of one pool."""
        num_blocks = sum(self._pool_sizes(num_requests))
        if self.num_encoder_tokens:
            [spec] = self.specs
            return PlainCrossManager(num_blocks, -(-NUM_ENCODER_TOKENS // spec.block_size))
        groups = [PlainGroup(bytes([i]), spec.block_size, window_of(spec)) for i, spec in enumerate(self.specs)]
        return PlainManager(num_blocks, groups)


def window_of(spec: KVCacheSpec) -> int | None:
    """Tokens whose blocks a request keeps; None: all, or all within these prompts."""
    return 2 if isinstance(spec, MambaSpec) else getattr(spec, "sliding_window", None)


SHAPES = {
    "full": Shape((FULL,)),
    "hybrid": Shape((FULL, *[SLIDING] * 5), prompt=2_048),
    "mla": Shape((MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16"),)),
    "chunked": Shape((ChunkedLocalAttentionSpec(attention_chunk_size=8_192, **HEADS),)),
    "sink": Shape((SinkFullAttentionSpec(sink_len=16, **HEADS),)),
    "cross": Shape((CROSS,)),
    "mamba_align": Shape((STATE,)),
    "deepseek_v4": Shape(DEEPSEEK_V4, pools_apart=True),
}


class Decoding:
    """`num_requests` requests past their prompts, with a block hash per full block."""

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
        for _ in range(WARM_UP_STEPS):
            self.append()
            self.plan()
            self.advance()

    def append(self) -> None:
        self.manager.request_table.append_tokens(self.rows, self.tokens())

    def tokens(self) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, self.rows.size).astype(np.int32)

    def plan(self) -> None:
        if self.manager.plan_step(self.rows, 1).num_planned != self.rows.size:
            raise AssertionError("a row did not fit")

    def advance(self) -> None:
        self.manager.request_table.advance(self.rows, 1)

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


def evicting_step_samples(num_requests: int) -> list[float]:
    decoding = Decoding(SHAPES["full"], num_requests)
    decoding.cache_free_blocks()
    pool = decoding.manager.block_pools[0]
    before = pool.num_evicted_blocks
    samples = samples_of(decoding)
    if pool.num_evicted_blocks - before < num_requests * NUM_STEPS // FULL.block_size:
        raise AssertionError("expected every new block to evict a cached one")
    return samples


def step_samples(shape: Shape, num_requests: int) -> list[float]:
    return samples_of(Decoding(shape, num_requests))


def samples_of(decoding: Decoding) -> list[float]:
    samples = []
    with collector_off():
        for _ in range(NUM_STEPS):
            decoding.append()
            samples.append(time_us(decoding.plan))
            decoding.advance()
    return samples


def step_with_tokens_samples(num_requests: int) -> list[float]:
    decoding = Decoding(SHAPES["full"], num_requests)
    table, rows = decoding.manager.request_table, decoding.rows
    samples = []
    with collector_off():
        for _ in range(NUM_STEPS):
            tokens = decoding.tokens()

            def step(tokens: np.ndarray = tokens) -> None:
                table.append_tokens(rows, tokens)
                decoding.plan()

            samples.append(time_us(step))
            decoding.advance()
    return samples


def allocate_slots_samples() -> list[float]:
    """Microseconds a call, over a step of 1,024 requests."""
    decoding = Decoding(SHAPES["full"], 1_024)
    allocate, requests = decoding.manager.allocate_slots, decoding.requests

    def step() -> None:
        for request in requests:
            allocate(request, 1)

    samples = []
    with collector_off():
        for _ in range(NUM_STEPS):
            decoding.append()
            samples.append(time_us(step) / len(requests))
            decoding.advance()
    return samples


class PlainDecoding:
    """The same requests in the plain manager; hashes are random, since nothing is shared."""

    def __init__(self, shape: Shape, num_requests: int) -> None:
        blocks_per_row = shape.most_tokens // shape.hash_block_size + 1
        self.manager = shape.plain_manager(num_requests)
        self.requests = [
            PlainRequest(f"r{i}", shape.prompt + i % shape.spread, [os.urandom(32) for _ in range(blocks_per_row)])
            for i in range(num_requests)
        ]
        for request in self.requests:
            self.manager.allocate_slots(request, request.num_tokens)
            request.num_computed = request.num_tokens
            for group in self.manager.groups:
                self.manager.release_skipped(group, request)
        self.step()

    def step(self) -> None:
        for request in self.requests:
            request.num_tokens += 1
            self.manager.allocate_slots(request, 1)
            request.num_computed += 1


def plain_evicting_step_samples(num_requests: int) -> list[float]:
    decoding = PlainDecoding(SHAPES["full"], num_requests)
    pool = decoding.manager.pool
    blocks = pool.get(len(pool.free))
    pool.register(blocks, [os.urandom(32) for _ in blocks])
    pool.release(blocks)
    return sample_us(decoding.step, NUM_STEPS // 4)


def plain_step_samples(shape: Shape, num_requests: int) -> list[float]:
    decoding = PlainDecoding(shape, num_requests)
    return sample_us(decoding.step, NUM_STEPS // 4)


def plain_step_with_tokens_samples(num_requests: int) -> list[float]:
    decoding = PlainDecoding(SHAPES["full"], num_requests)
    rng, hasher = np.random.default_rng(0), BlockHasher(block_size := 16, seed="bench")
    tokens = [rng.integers(0, VOCABULARY, 1_024 + i % block_size).tolist() for i in range(num_requests)]

    def step() -> None:
        for request, own in zip(decoding.requests, tokens, strict=True):
            own.append(7)
            if len(own) % block_size == 0:
                parent, column = request.hashes[len(own) // block_size - 2], len(own) // block_size - 1
                [request.hashes[column]] = hasher.hash_tokens(np.array(own[-block_size:]), parent)
        decoding.step()

    return sample_us(step, NUM_STEPS // 4)


Samples = Callable[..., list[float]]


def case(name: str, run: Samples, baseline: Samples, *arguments: object) -> BenchCase:
    return BenchCase(name, partial(run, *arguments), partial(baseline, *arguments))


def cases() -> list[BenchCase]:
    sizes = (256, 1_024, 4_096)
    steps = [
        case(f"decode_step/{name}/{n}", step_samples, plain_step_samples, shape, n)
        for name, shape in SHAPES.items()
        for n in (sizes if name in ("full", "hybrid") else (1_024,))
    ]
    evicting = case("decode_step/full/1024/evicting", evicting_step_samples, plain_evicting_step_samples, 1_024)
    with_tokens = [
        case(f"decode_step_with_tokens/full/{n}", step_with_tokens_samples, plain_step_with_tokens_samples, n)
        for n in sizes[:2]
    ]
    one_call = BenchCase(
        "allocate_slots/decode",
        allocate_slots_samples,
        lambda: [sample / 1_024 for sample in plain_step_samples(SHAPES["full"], 1_024)],
    )
    return [*steps, evicting, *with_tokens, one_call]
