"""Cases of the manager: decoding steps, allocation, prefix hits and frees, in blocks of 16 tokens.

Decoding starts from 1,024 + (i mod 16) prompt tokens (hybrid: 2,048 + ..., so that windows release), so that every
step fills the blocks of a sixteenth of the requests; the samples are whole steps. Hits are looked up with hash objects
that Python has not hashed before. The baseline is `PlainManager`, called once per request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, collector_off, sample_us, time_us
from bench_host_cases.plain_manager import PlainCrossManager, PlainGroup, PlainManager, PlainRequest
from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MLAAttentionSpec,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 16
WINDOW = 1_024
NUM_STEPS = 64
WARM_UP_STEPS = 2
VOCABULARY = 150_000
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
SLIDING = SlidingWindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=WINDOW
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16", attention_chunk_size=8_192
)
SINK = SinkFullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16", sink_len=16)
NUM_ENCODER_TOKENS = 1_500  # 30 s of audio
CROSS = CrossAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=20, head_size=64, dtype="bfloat16", max_num_encoder_tokens=NUM_ENCODER_TOKENS
)
MLA = MLAAttentionSpec(block_size=BLOCK_SIZE, head_size=576, dtype="bfloat16")
SPECS: dict[str, list[KVCacheSpec]] = {
    "full": [FULL],
    "hybrid": [FULL] + [SLIDING] * 5,
    "mla": [MLA],
    "chunked": [CHUNKED],
    "sink": [SINK],
    "cross": [CROSS],
}
PROMPT = {"full": 1_024, "hybrid": 2_048, "mla": 1_024, "chunked": 1_024, "sink": 1_024, "cross": 1_024}
OTHER_KINDS = ("mla", "chunked", "sink", "cross")


def num_blocks_for(shape: str, num_requests: int) -> int:
    """Enough that no step of a case evicts a cached block: those are the pool's cases."""
    grown = (BLOCK_SIZE + NUM_STEPS + WARM_UP_STEPS) // BLOCK_SIZE + 2
    held = PROMPT[shape] // BLOCK_SIZE + grown + (len(SPECS[shape]) - 1) * (WINDOW // BLOCK_SIZE + grown)
    if shape == "cross":
        held = -(-NUM_ENCODER_TOKENS // BLOCK_SIZE)
    return num_requests * held + len(SPECS[shape]) * PROMPT[shape] // BLOCK_SIZE + 2  # the null block and a sink


class Decoding:
    """`num_requests` requests past their prompts, with a block hash per full block."""

    def __init__(self, shape: str, num_requests: int) -> None:
        specs, prompt = SPECS[shape], PROMPT[shape]
        max_model_len = prompt + BLOCK_SIZE + NUM_STEPS + WARM_UP_STEPS + 1
        hasher = BlockHasher(BLOCK_SIZE, seed="bench")
        self.rng = np.random.default_rng(0)
        self.manager = KVCacheManager(
            KVCacheConfig.single_pool(num_blocks_for(shape, num_requests), *specs),
            max_model_len,
            BLOCK_SIZE,
            max_num_reqs=num_requests,
        )
        self.requests = []
        for i in range(num_requests):
            tokens = self.rng.integers(0, VOCABULARY, prompt + i % BLOCK_SIZE).astype(np.int32)
            request = Request(f"r{i}", tokens, block_hasher=hasher)
            encoder = NUM_ENCODER_TOKENS if shape == "cross" else 0
            options = {"delay_cache_blocks": True, "num_encoder_tokens": encoder}
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


def step_samples(shape: str, num_requests: int) -> list[float]:
    decoding = Decoding(shape, num_requests)
    samples = []
    with collector_off():
        for _ in range(NUM_STEPS):
            decoding.append()
            samples.append(time_us(decoding.plan))
            decoding.advance()
    return samples


def step_with_tokens_samples(num_requests: int) -> list[float]:
    decoding = Decoding("full", num_requests)
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
    decoding = Decoding("full", 1_024)
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

    def __init__(self, shape: str, num_requests: int) -> None:
        self.hasher = BlockHasher(BLOCK_SIZE, seed="bench")
        prompt, num_groups = PROMPT[shape], len(SPECS[shape])
        groups = [PlainGroup(bytes([i]), None if i == 0 else WINDOW) for i in range(num_groups)]
        blocks_per_row = (prompt + BLOCK_SIZE + NUM_STEPS) // BLOCK_SIZE + 2
        self.manager = PlainManager(num_blocks_for(shape, num_requests), groups, BLOCK_SIZE)
        if shape == "cross":
            fixed = -(-NUM_ENCODER_TOKENS // BLOCK_SIZE)
            self.manager = PlainCrossManager(num_blocks_for(shape, num_requests), fixed, BLOCK_SIZE)
        self.requests = [
            PlainRequest(f"r{i}", prompt + i % BLOCK_SIZE, [os.urandom(32) for _ in range(blocks_per_row)])
            for i in range(num_requests)
        ]
        for request in self.requests:
            self.manager.allocate_slots(request, request.num_tokens)
            request.num_computed = request.num_tokens
            for group in groups:
                self.manager.release_skipped(group, request)
        self.step()

    def step(self) -> None:
        for request in self.requests:
            request.num_tokens += 1
            self.manager.allocate_slots(request, 1)
            request.num_computed += 1


def plain_step_samples(shape: str, num_requests: int) -> list[float]:
    decoding = PlainDecoding(shape, num_requests)
    return sample_us(decoding.step, NUM_STEPS // 4)


def plain_step_with_tokens_samples(num_requests: int) -> list[float]:
    decoding = PlainDecoding("full", num_requests)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCABULARY, 1_024 + i % BLOCK_SIZE).tolist() for i in range(num_requests)]

    def step() -> None:
        for request, own in zip(decoding.requests, tokens, strict=True):
            own.append(7)
            if len(own) % BLOCK_SIZE == 0:
                parent, column = request.hashes[len(own) // BLOCK_SIZE - 2], len(own) // BLOCK_SIZE - 1
                [request.hashes[column]] = decoding.hasher.hash_tokens(np.array(own[-BLOCK_SIZE:]), parent)
        decoding.step()

    return sample_us(step, NUM_STEPS // 4)


class LongPrompt:
    """Prompts of `num_tokens` + 1 tokens, whose first `num_tokens` fill blocks, in a pool that holds two of them.

    Taken in turn, a prompt is no longer cached when its turn comes, and the blocks that it gets hold older hashes.
    """

    num_prompts = 4

    def __init__(self, num_tokens: int) -> None:
        rng, hasher = np.random.default_rng(0), BlockHasher(BLOCK_SIZE, seed="bench")
        self.num_tokens = num_tokens
        self.manager = KVCacheManager(
            KVCacheConfig.single_pool(2 * num_tokens // BLOCK_SIZE + 1, FULL), num_tokens + BLOCK_SIZE, BLOCK_SIZE
        )
        prompts = [rng.integers(0, VOCABULARY, num_tokens + 1).astype(np.int32) for _ in range(self.num_prompts)]
        self.requests = [Request(f"r{i}", prompt, block_hasher=hasher) for i, prompt in enumerate(prompts)]
        self.request = self.requests[0]

    def next_prompt(self) -> None:
        self.requests.append(self.requests.pop(0))
        self.request = self.requests[0]

    def allocate(self) -> None:
        if self.manager.allocate_slots(self.request, self.num_tokens) is None:
            raise AssertionError("the pool is too small")

    def free(self) -> None:
        self.manager.free(self.request)

    def renew_hashes(self) -> None:
        self.request.block_hashes[:] = [bytes(bytearray(block_hash)) for block_hash in self.request.block_hashes]

    def look_up(self) -> None:
        if self.manager.get_computed_blocks(self.request)[1] != self.num_tokens:
            raise AssertionError("expected a hit of the whole prompt")


class PlainLongPrompt:
    """The same in the plain manager."""

    def __init__(self, num_tokens: int) -> None:
        num_blocks = num_tokens // BLOCK_SIZE
        self.num_tokens = num_tokens
        self.manager = PlainManager(2 * num_blocks + 1, [PlainGroup(b"\0")], BLOCK_SIZE)
        self.requests = [
            PlainRequest(f"r{i}", num_tokens, [os.urandom(32) for _ in range(num_blocks)])
            for i in range(LongPrompt.num_prompts)
        ]
        self.request = self.requests[0]

    def next_prompt(self) -> None:
        self.requests.append(self.requests.pop(0))
        self.request = self.requests[0]

    def allocate(self) -> None:
        self.manager.allocate_slots(self.request, self.num_tokens)

    def free(self) -> None:
        self.manager.free(self.request)

    def renew_hashes(self) -> None:
        self.request.hashes = [bytes(bytearray(block_hash)) for block_hash in self.request.hashes]

    def look_up(self) -> None:
        if len(self.manager.find_hit(self.request)) * BLOCK_SIZE != self.num_tokens:
            raise AssertionError("expected a hit of the whole prompt")


def allocate_samples(prompt: type[LongPrompt] | type[PlainLongPrompt], num_tokens: int) -> list[float]:
    long = prompt(num_tokens)
    long.allocate()

    def replace() -> None:
        long.free()
        long.next_prompt()

    for _ in range(LongPrompt.num_prompts):
        replace()
        long.allocate()
    return sample_us(long.allocate, 50, replace)


def free_samples(prompt: type[LongPrompt] | type[PlainLongPrompt], num_tokens: int) -> list[float]:
    long = prompt(num_tokens)
    long.next_prompt()

    def replace() -> None:
        long.next_prompt()
        long.allocate()

    return sample_us(long.free, 100, replace)


def hit_samples(prompt: type[LongPrompt] | type[PlainLongPrompt], num_tokens: int) -> list[float]:
    long = prompt(num_tokens)
    long.allocate()
    return sample_us(long.look_up, 100, long.renew_hashes)


Samples = Callable[..., list[float]]


def case(name: str, run: Samples, baseline: Samples, *arguments: object) -> BenchCase:
    return BenchCase(name, partial(run, *arguments), partial(baseline, *arguments))


def cases() -> list[BenchCase]:
    sizes = (256, 1_024, 4_096)
    steps = [
        case(f"decode_step/{shape}/{n}", step_samples, plain_step_samples, shape, n)
        for shape in ("full", "hybrid")
        for n in sizes
    ]
    steps += [
        case(f"decode_step/{shape}/1024", step_samples, plain_step_samples, shape, 1_024) for shape in OTHER_KINDS
    ]
    with_tokens = [
        case(f"decode_step_with_tokens/full/{n}", step_with_tokens_samples, plain_step_with_tokens_samples, n)
        for n in sizes[:2]
    ]
    return [
        *steps,
        *with_tokens,
        BenchCase(
            "allocate_slots/decode",
            allocate_slots_samples,
            lambda: [sample / 1_024 for sample in plain_step_samples("full", 1_024)],
        ),
        long_case("allocate/32k", allocate_samples, 32_768),
        long_case("prefix_hit/2k", hit_samples, 2_048),
        long_case("prefix_hit/32k", hit_samples, 32_768),
        long_case("free/32k", free_samples, 32_768),
    ]


def long_case(name: str, samples: Callable[..., list[float]], num_tokens: int) -> BenchCase:
    return BenchCase(name, partial(samples, LongPrompt, num_tokens), partial(samples, PlainLongPrompt, num_tokens))
