"""`PriorityOrder` against a sorted list, with fronts from one block up."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.eviction.priority_order import PriorityOrder
from kvjax.errors import InvariantError

NUM_BLOCKS = 25


class Both:
    """An order and its model: a list of (priority, number of the push, block)."""

    def __init__(self, seed: int, front_size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.order = PriorityOrder(NUM_BLOCKS)
        self.order._front_size = front_size
        self.model: list[tuple[float, int, int]] = []
        self.num_pushes = 0

    def push(self, priorities: int = 6) -> None:
        """Priorities are few, so that equal ones abound."""
        queued = [block for _, _, block in self.model]
        absent = self.rng.permutation([block for block in range(NUM_BLOCKS) if block not in queued])
        ids = absent[: self.rng.integers(0, absent.size + 1)].astype(np.int64)
        given = self.rng.integers(0, priorities, ids.size).astype(float)
        self.order.push(ids, given)
        for block, priority in zip(ids.tolist(), given.tolist(), strict=True):
            self.model.append((priority, self.num_pushes, block))
            self.num_pushes += 1

    def pop(self) -> None:
        count = int(self.rng.integers(0, len(self.model) + 1))
        assert self.order.pop(count).tolist() == [block for _, _, block in sorted(self.model)[:count]]
        self.model = sorted(self.model)[count:]

    def remove(self) -> None:
        """From the middle; they may come back."""
        queued = [block for _, _, block in self.model]
        ids = self.rng.permutation(queued)[: self.rng.integers(0, 4)].astype(np.int64)
        self.order.remove(ids)
        self.model = [entry for entry in self.model if entry[2] not in ids.tolist()]

    def check(self) -> None:
        self.order.check_invariants()
        assert self.order.num_queued == len(self.model)
        assert self.order.order().tolist() == [block for _, _, block in sorted(self.model)]
        queued = [block for _, _, block in self.model]
        assert self.order.contains_n(np.arange(NUM_BLOCKS)).tolist() == [b in queued for b in range(NUM_BLOCKS)]


@pytest.mark.parametrize("front_size", [1, 2, 5, 30])
@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_a_sorted_list(seed: int, front_size: int) -> None:
    both = Both(seed, front_size)
    for _ in range(300):
        (both.push, both.pop, both.remove)[both.rng.integers(3)]()
        both.check()


@pytest.mark.parametrize("front_size", [1, 2, 5, 30])
@pytest.mark.parametrize("seed", range(8))
def test_entries_are_bounded_by_the_blocks_where_nobody_pops(seed: int, front_size: int) -> None:
    """Pressure, then blocks that leave and come back below the bound: at most one entry a block in front, as many late.

    The orders still agree when pressure is back.
    """
    both = Both(seed, front_size)
    for _ in range(4):
        both.push()
        both.pop()
        for i in range(200):
            (both.push if i % 2 else both.remove)()
            order = both.order
            assert order._front.shape[1] <= NUM_BLOCKS
            assert sum(entries.shape[1] for entries in order._late) <= max(front_size, NUM_BLOCKS)
            if i % 7 == 0:
                both.check()
        both.pop()
        both.check()


def test_many_pushes_below_the_bound_cost_about_one_sort() -> None:
    """The front is cut each time that late is as long, so sorted entries stay in proportion to pushed ones."""
    order = PriorityOrder(100_000)
    num_sorted = 0

    def counted(entries: np.ndarray) -> np.ndarray:
        nonlocal num_sorted
        num_sorted += entries.shape[1]
        return original(entries)

    original, order._sorted = order._sorted, counted  # type: ignore[method-assign]
    order.push(np.arange(100_000), np.full(100_000, 2.0))
    order.pop(50_000)
    num_sorted = 0
    for start in range(0, 50_000, 10):
        order.push(np.arange(start, start + 10), np.full(10, 1.0 - start / 50_000))
    assert num_sorted <= 3 * 50_000
    assert order.pop(10).tolist() == list(range(49_990, 50_000))


def test_a_front_is_no_longer_where_all_blocks_are_equal() -> None:
    """A pop looks at the whole front."""
    order = PriorityOrder(10_000)
    order.push(np.arange(10_000), np.ones(10_000))
    assert order.pop(10).tolist() == list(range(10))
    assert order._front.shape[1] == order._front_size - 10
    order.push(np.arange(10), np.zeros(10))
    assert order.pop(order._front_size + 5).tolist() == list(range(order._front_size + 5))
    order.check_invariants()


def test_the_checker_sees_a_block_that_the_front_lost() -> None:
    order = PriorityOrder(8)
    order.push(np.arange(8), np.arange(8.0))
    order.pop(1)
    order._front = order._front[:, 1:]
    with pytest.raises(InvariantError, match="O1: a block below the bound is not in the front or late"):
        order.check_invariants()


def test_the_checker_sees_late_entries_that_pile_up() -> None:
    order = PriorityOrder(8)
    order.push(np.arange(3), np.zeros(3))
    order.pop(3)
    for _ in range(4):
        order.push(np.arange(1), np.zeros(1))
        order.remove(np.arange(1))
    order.check_invariants()
    order._num_late = 5
    with pytest.raises(InvariantError, match="O2: 4 late entries, 5 counted"):
        order.check_invariants()
    order._num_late, order._front_size = 4, 2
    with pytest.raises(InvariantError, match="O2: 4 late entries, 4 counted"):
        order.check_invariants()
