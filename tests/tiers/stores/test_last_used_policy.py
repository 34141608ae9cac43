"""The host's order in lock step with a sorted list."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.pool.prefix_index import PrefixIndex
from kvjax.tiers.stores.last_used_policy import LastUsedPolicy

NEVER = -1


@pytest.mark.parametrize("seed", range(8))
def test_what_was_used_longest_ago_goes_first(seed: int) -> None:
    """What was never taken goes before all; of equal ones the first released. The heap keeps little of what left it."""
    rng, policy = np.random.default_rng(seed), LastUsedPolicy(PrefixIndex(20, (0,)))
    free = [(NEVER, block, block) for block in range(1, 20)]  # last use, number of the release, block
    held: list[int] = []
    for number in range(400):
        released = rng.permutation(held)[: rng.integers(0, 4)].astype(np.int64)
        policy.last_used[released] = rng.integers(0, number // 10 + 1, released.size)
        policy.release(released)
        free += [
            (policy.last_used.item(block), 100 + 4 * number + i, block) for i, block in enumerate(released.tolist())
        ]
        free.sort()
        num_taken = int(rng.integers(0, min(len(free), 3) + 1))
        taken, free = [block for *_, block in free[:num_taken]], free[num_taken:]
        assert policy.take(num_taken).tolist() == taken
        removed = [free.pop(int(rng.integers(len(free))))[2] for _ in range(rng.integers(0, min(len(free), 2) + 1))]
        policy.remove(np.array(removed, np.int64))
        held = [*(block for block in held if block not in released), *taken, *removed]
        assert policy.order().tolist() == [block for *_, block in free]
        assert policy.num_free == len(free)
        assert len(policy._heap) <= 2 * len(policy._release_of) + 64 + released.size
