"""References outside block tables: their number of blocks is kept, never counted over the pool."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvjax.core.pool.outside_refs import OutsideRefs
from kvjax.errors import InvariantError


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_as_a_multiset_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    refs, model = OutsideRefs(8), Counter[int]()
    for _ in range(60):
        held = list(model.elements())
        if held and rng.random() < 0.5:
            some = rng.choice(held, int(rng.integers(1, len(held) + 1)), replace=False)
            refs.drop(some)
            model -= Counter(some.tolist())
        elif rng.random() < 0.5:
            some = rng.integers(1, 8, int(rng.integers(0, 6)))
            refs.add(some)
            model += Counter(some.tolist())
        else:
            block_id = int(rng.integers(1, 8))
            refs.add_one(block_id)
            model[block_id] += 1
        assert refs.num_blocks == len(model)
        assert refs.counts.tolist() == [model[block_id] for block_id in range(8)]
        refs.check_invariants()


def test_the_checker_finds_a_wrong_number() -> None:
    refs = OutsideRefs(4)
    refs.add_one(2)
    refs.num_blocks = 2
    with pytest.raises(InvariantError, match="O1: 2 blocks counted with outside references, 1 have one"):
        refs.check_invariants()


def test_lent_references_count_with_the_others_and_apart() -> None:
    refs = OutsideRefs(4)
    refs.add_one(2)
    refs.lend(np.array([2, 3, 3]))
    assert (refs.counts.tolist(), refs.lent.tolist(), refs.num_blocks) == ([0, 0, 2, 2], [0, 0, 1, 2], 2)
    refs.take_back(np.array([3, 2, 3]))
    assert (refs.counts.tolist(), refs.lent.tolist(), refs.num_blocks) == ([0, 0, 1, 0], [0, 0, 0, 0], 1)
    refs.check_invariants()
