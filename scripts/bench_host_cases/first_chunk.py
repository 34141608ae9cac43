"""A first long prompt among short ones: the longest time of one call.

256 requests decode, in one full and five sliding-window groups. A request of a million tokens, whose block hashes are
known, is looked up and gets slots for its first chunk and its second; then all rows decode a step, and it is freed.
The sample is the longest of these calls, and each comes from a new manager, since tables grow once. The baseline is
`PlainManager`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from bench_host_cases.case import BenchCase, collector_off, time_us
from bench_host_cases.decoding import FULL, SLIDING, VOCABULARY
from bench_host_cases.plain_manager import PlainGroup, PlainManager, PlainRequest
from kvjax.core import BlockHasher, KVCacheConfig, KVCacheManager, Request

NUM_REQUESTS = 256
SHORT, LONG, CHUNK = 1_000, 1_000_000, 8_192  # tokens
BLOCK_SIZE = 16
SPECS = (FULL, *[SLIDING] * 5)
NUM_BLOCKS = len(SPECS) * (NUM_REQUESTS * (SHORT // BLOCK_SIZE + 2) + 3 * CHUNK // BLOCK_SIZE)
REPETITIONS = 5


def longest_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds of the call that takes longest, collector off."""
    with collector_off():
        return max([time_us(call) for call in calls])


class FirstChunk:
    """The managers of the samples, each made anew, and one long request for all."""

    def __init__(self) -> None:
        self.rng, self.hasher = np.random.default_rng(0), BlockHasher(BLOCK_SIZE, seed="bench")
        self.long = self.request("long", LONG)

    def request(self, name: str, num_tokens: int) -> Request:
        tokens = self.rng.integers(0, VOCABULARY, num_tokens).astype(np.int32)
        return Request(name, tokens, block_hasher=self.hasher)

    def sample(self) -> float:
        config = KVCacheConfig.single_pool(NUM_BLOCKS, *SPECS)
        manager = KVCacheManager(config, 1 << 20, BLOCK_SIZE, max_num_reqs=NUM_REQUESTS)
        running = [self.request(f"r{i}", SHORT) for i in range(NUM_REQUESTS - 1)]
        for request in running:
            if manager.allocate_slots(request, SHORT) is None:
                raise AssertionError("the pool is too small")
            request.num_computed_tokens = SHORT
        long, rows = self.long, np.array([request.row for request in running])

        def admit() -> None:
            if manager.allocate_slots(long, CHUNK) is None:
                raise AssertionError("the pool is too small")

        def go_on() -> None:
            long.num_computed_tokens = CHUNK
            if manager.allocate_slots(long, CHUNK) is None:
                raise AssertionError("the pool is too small")

        calls: list[Callable[[], object]] = [
            lambda: manager.get_computed_blocks(long),
            admit,
            go_on,
            lambda: manager.request_table.append_tokens(rows, np.zeros(rows.size, np.int32)),
            lambda: manager.plan_step(rows, 1),
            lambda: manager.free(long),
        ]
        longest = longest_us(calls)
        long.num_computed_tokens = 0
        return longest


def first_chunk_samples() -> list[float]:
    case = FirstChunk()
    return [case.sample() for _ in range(REPETITIONS)]


def plain_sample() -> float:
    window = SLIDING.sliding_window
    groups = [PlainGroup(bytes([i]), BLOCK_SIZE, window if i else None) for i in range(len(SPECS))]
    manager = PlainManager(NUM_BLOCKS, groups)
    running = [plain_request(f"r{i}", SHORT) for i in range(NUM_REQUESTS - 1)]
    for request in running:
        manager.allocate_slots(request, SHORT)
        request.num_computed = SHORT
    long = plain_request("long", LONG)

    def go_on() -> None:
        long.num_computed = CHUNK
        manager.allocate_slots(long, CHUNK)

    def decode() -> None:
        for request in running:
            request.num_tokens += 1
            manager.allocate_slots(request, 1)

    return longest_us(
        [
            lambda: manager.find_hit(long),
            lambda: manager.allocate_slots(long, CHUNK),
            go_on,
            decode,
            lambda: manager.free(long),
        ]
    )


def plain_request(name: str, num_tokens: int) -> PlainRequest:
    return PlainRequest(name, num_tokens, [os.urandom(32) for _ in range(num_tokens // BLOCK_SIZE)])


def cases() -> list[BenchCase]:
    """The one case."""
    return [BenchCase("first_chunk/1M", first_chunk_samples, lambda: [plain_sample() for _ in range(REPETITIONS)])]
