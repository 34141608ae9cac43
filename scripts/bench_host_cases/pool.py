"""Cases of the block pool and the hasher: 1,000 blocks taken, given back, taken while cached; 32k tokens hashed."""

from __future__ import annotations

import os

from bench_host_cases.case import BenchCase, Side, case, sample_us
from kvjax.core.hashing.block_hash import ALGORITHMS

NUM_TAKEN = 1_000
NUM_BLOCKS = 100_001
NUM_HASHED = 32_768


def get_samples(side: Side) -> list[float]:
    pool = side.pool(NUM_BLOCKS)
    return sample_us(lambda: pool.get_new_blocks(NUM_TAKEN), 90)


def free_samples(side: Side) -> list[float]:
    pool, taken = side.pool(NUM_BLOCKS), []
    return sample_us(
        lambda: pool.free_blocks(taken[-1]), 200, lambda: taken.append(pool.get_new_blocks(NUM_TAKEN)[::-1])
    )


def get_evicting_samples(side: Side) -> list[float]:
    pool = side.pool(NUM_TAKEN + 1)
    held = [pool.get_new_blocks(NUM_TAKEN)]

    def fill() -> None:
        side.register(pool, held[0], [os.urandom(32) for _ in range(NUM_TAKEN)])
        pool.free_blocks(held[0][::-1])

    def take() -> None:
        held[0] = pool.get_new_blocks(NUM_TAKEN)

    return sample_us(take, 200, fill)


def hash_samples(side: Side, algorithm: str) -> list[float]:
    return sample_us(side.hashing(algorithm, NUM_HASHED), 20)


def cases() -> list[BenchCase]:
    """The pool's and the hasher's."""
    return [
        case(f"pool/get/{NUM_TAKEN}", get_samples),
        case(f"pool/free/{NUM_TAKEN}", free_samples),
        case(f"pool/get_evicting/{NUM_TAKEN}", get_evicting_samples),
        *(case(f"hash/{algorithm}/32k", hash_samples, algorithm) for algorithm in ALGORITHMS),
    ]
