"""Cases of the block pool: 1,000 blocks taken, given back, and taken while they are still cached.

The baseline is a pool of one Python object per block, an OrderedDict as free list and a dict as hash index.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from bench_host_cases.case import BenchCase, sample_us
from kvjax.core.pool.block_pool import BlockPool

NUM_TAKEN = 1_000
NUM_BLOCKS = 100_001
REPETITIONS = 200


class PlainBlock:
    """One block of the baseline."""

    __slots__ = ("block_hash", "block_id", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None


class PlainPool:
    """A block at a time, checks included."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [PlainBlock(block_id) for block_id in range(num_blocks)]
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.index: dict[bytes, int] = {}

    def get(self, count: int) -> list[PlainBlock]:
        if count > len(self.free):
            raise ValueError(f"needs {count} blocks, {len(self.free)} free")
        taken = []
        for _ in range(count):
            block = self.blocks[self.free.popitem(last=False)[0]]
            if block.block_hash is not None:
                del self.index[block.block_hash]
                block.block_hash = None
            block.ref_count += 1
            taken.append(block)
        return taken

    def register(self, blocks: list[PlainBlock], hashes: list[bytes]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.block_hash = block_hash
            self.index[block_hash] = block.block_id

    def release(self, blocks: list[PlainBlock]) -> None:
        for block in blocks:
            if block.ref_count < 1:
                raise ValueError(f"block {block.block_id} is free")
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block.block_id] = None


class Hashes:
    """An endless supply of distinct hashes."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def take(self, count: int) -> list[bytes]:
        return [self.random.randbytes(32) for _ in range(count)]


def get_samples() -> list[float]:
    pool = BlockPool(NUM_BLOCKS)
    return sample_us(lambda: pool.get_new_blocks(NUM_TAKEN), 90)


def plain_get_samples() -> list[float]:
    pool = PlainPool(NUM_BLOCKS)
    return sample_us(lambda: pool.get(NUM_TAKEN), 90)


def free_samples() -> list[float]:
    pool = BlockPool(NUM_BLOCKS)
    taken = []
    return sample_us(
        lambda: pool.free_blocks(taken[-1]), REPETITIONS, lambda: taken.append(pool.get_new_blocks(NUM_TAKEN)[::-1])
    )


def plain_free_samples() -> list[float]:
    pool = PlainPool(NUM_BLOCKS)
    taken = []
    return sample_us(lambda: pool.release(taken[-1]), REPETITIONS, lambda: taken.append(pool.get(NUM_TAKEN)[::-1]))


def get_evicting_samples() -> list[float]:
    pool, hashes = BlockPool(NUM_TAKEN + 1), Hashes()
    held = [pool.get_new_blocks(NUM_TAKEN)]

    def fill() -> None:
        pool.register_many(held[0], hashes.take(NUM_TAKEN), 0)
        pool.free_blocks(held[0][::-1])

    def take() -> None:
        held[0] = pool.get_new_blocks(NUM_TAKEN)

    return sample_us(take, REPETITIONS, fill)


def plain_get_evicting_samples() -> list[float]:
    pool, hashes = PlainPool(NUM_TAKEN + 1), Hashes()
    held = [pool.get(NUM_TAKEN)]

    def fill() -> None:
        pool.register(held[0], hashes.take(NUM_TAKEN))
        pool.release(held[0][::-1])

    def take() -> None:
        held[0] = pool.get(NUM_TAKEN)

    return sample_us(take, REPETITIONS, fill)


def cases() -> list[BenchCase]:
    """The pool's cases."""
    return [
        BenchCase("pool/get/1000", get_samples, plain_get_samples),
        BenchCase("pool/free/1000", free_samples, plain_free_samples),
        BenchCase("pool/get_evicting/1000", get_evicting_samples, plain_get_evicting_samples),
    ]
