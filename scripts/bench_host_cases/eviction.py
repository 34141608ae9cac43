"""Cases of what an eviction policy costs beside LRU: a prompt that evicts another one, and the work between steps.

The pool is full of cached prompts; each new one, of 1,024 tokens, evicts as many blocks as it takes. Inside an
admission are the lookup and the slots. Between steps are the end of the request and the start of the next step. The
baseline is the same under "lru". What "learned" does once in 200 requests, for about 300 us, no median shows.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench_host_cases.admission import BLOCK_SIZE, FULL, MAX_MODEL_LEN, VOCABULARY
from bench_host_cases.case import BenchCase, collector_off, time_us
from kvjax.core import BlockHasher, KVCacheConfig, KVCacheManager, Request

NUM_TOKENS = 1_024
NUM_CACHED = 100  # prompts that the pool holds
REPETITIONS = 500
POLICIES = ("probation", "learned")
PARTS = ("inside_admission", "between_steps")


def samples(part: str, policy: str) -> list[float]:
    """Microseconds of one part of each of `REPETITIONS` requests."""
    config = KVCacheConfig.single_pool(NUM_CACHED * NUM_TOKENS // BLOCK_SIZE + 1, FULL)
    manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE, eviction_policy=policy)
    hasher = BlockHasher(BLOCK_SIZE, "xxhash_cbor", seed="bench")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_CACHED + REPETITIONS, NUM_TOKENS)).astype(np.int32)
    requests = [Request(f"r{i}", row, block_hasher=hasher) for i, row in enumerate(tokens)]
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    with collector_off():
        for request in requests:
            found["inside_admission"].append(time_us(partial(admit, manager, request)))
            request.num_computed_tokens = NUM_TOKENS
            found["between_steps"].append(time_us(partial(end_step, manager, request)))
    return found[part][NUM_CACHED:]


def admit(manager: KVCacheManager, request: Request) -> None:
    hit, num_computed = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, NUM_TOKENS - num_computed, num_computed, hit) is None:
        raise AssertionError("the pool is too small")


def end_step(manager: KVCacheManager, request: Request) -> None:
    manager.free(request)
    manager.new_step_starts()


def cases() -> list[BenchCase]:
    """One for each part and policy."""
    return [
        BenchCase(f"evict/{part}/{policy}", partial(samples, part, policy), partial(samples, part, "lru"))
        for part in PARTS
        for policy in POLICIES
    ]
