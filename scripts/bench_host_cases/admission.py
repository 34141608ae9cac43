"""Cases of short requests: one is looked up, misses, gets slots for its whole prompt, and is freed.

Every request is a new one whose block hashes are known, and no block is evicted. The sample is the sum of the three
calls. The baseline is `PlainManager`.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, sample_us
from bench_host_cases.plain_manager import PlainGroup, PlainManager, PlainRequest
from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, Request

BLOCK_SIZE = 16
VOCABULARY = 150_000
MAX_MODEL_LEN = 8_192
REPETITIONS = 200
SIZES = {"40": 40, "200": 200, "1k": 1_024, "4k": 4_096}
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")


def num_blocks_for(num_tokens: int) -> int:
    """Blocks of a pool in which no request of a case evicts what another one left."""
    return (REPETITIONS + 2) * -(-num_tokens // BLOCK_SIZE) + 1


def admission_samples(num_tokens: int) -> list[float]:
    rng, hasher = np.random.default_rng(0), BlockHasher(BLOCK_SIZE, seed="bench")
    config = KVCacheConfig.single_pool(num_blocks_for(num_tokens), FULL)
    manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE, max_num_reqs=256)
    tokens = rng.integers(0, VOCABULARY, (REPETITIONS + 1, num_tokens)).astype(np.int32)
    requests = [Request(f"r{i}", row, block_hasher=hasher) for i, row in enumerate(tokens)]

    def admit() -> None:
        request = requests.pop()
        hit, num_computed = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, num_tokens - num_computed, num_computed, hit) is None:
            raise AssertionError("the pool is too small")
        manager.free(request)

    return sample_us(admit, REPETITIONS)


def plain_admission_samples(num_tokens: int) -> list[float]:
    manager = PlainManager(num_blocks_for(num_tokens), [PlainGroup(b"\0", BLOCK_SIZE)])
    requests = [
        PlainRequest(f"r{i}", num_tokens, [os.urandom(32) for _ in range(num_tokens // BLOCK_SIZE)])
        for i in range(REPETITIONS + 1)
    ]

    def admit() -> None:
        request = requests.pop()
        request.num_computed = len(manager.find_hit(request)) * BLOCK_SIZE
        if manager.allocate_slots(request, num_tokens - request.num_computed) is None:
            raise AssertionError("the pool is too small")
        manager.free(request)

    return sample_us(admit, REPETITIONS)


def cases() -> list[BenchCase]:
    """One per length of the prompt."""
    return [
        BenchCase(f"admit/{name}", partial(admission_samples, size), partial(plain_admission_samples, size))
        for name, size in SIZES.items()
    ]
