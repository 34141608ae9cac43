"""The ghost list against a list that forgets nothing, and its memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvjax.core import BlockHash, EvictedBlock
from kvjax.core.watch.evicted_blocks import EvictedBlocks


@pytest.mark.parametrize("max_blocks", [1, 2, 5, 1_000])
def test_agrees_with_a_list_of_all_evictions(max_blocks: int) -> None:
    rng, now = np.random.default_rng(max_blocks), [0]
    ghosts = EvictedBlocks(max_blocks, lambda: now[0])
    forgotten: list[tuple[int, bytes, bool, int]] = []
    keys = [(group, BlockHash(bytes([value]))) for group in range(2) for value in range(6)]
    for _ in range(300):
        now[0] += 500_000_000
        added = [keys[i] for i in rng.integers(0, len(keys), rng.integers(0, 8))]
        was_reused = bool(rng.integers(2))
        ghosts.add([key[1] for key in added], [key[0] for key in added], was_reused)
        forgotten += [(*key, was_reused, now[0]) for key in added]
        remembered = list(enumerate(forgotten))[-max_blocks:]
        assert len(ghosts) == len({entry[:2] for _, entry in remembered})
        for group, block_hash in keys:
            last = next((n for n, entry in reversed(remembered) if entry[:2] == (group, block_hash)), None)
            assert ghosts.number_of(block_hash, group) == last
            if last is not None:
                _, _, reused, time_ns = forgotten[last]
                expected = EvictedBlock(reused, len(forgotten) - 1 - last, (now[0] - time_ns) / 1e9)
                assert (ghosts.describe(last), ghosts.was_reused(last)) == (expected, reused)


def test_memory_is_what_the_docstring_says() -> None:
    tracemalloc.start()
    try:
        ghosts = EvictedBlocks(10_000, lambda: 1)
        empty, _ = tracemalloc.get_traced_memory()
        for i in range(40_000):
            ghosts.add([BlockHash(i.to_bytes(32, "big"))], [0], was_reused=True)
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ghosts) == 10_000
    assert empty <= 10_000 * 16 * 1.01
    assert full <= 10_000 * 330
