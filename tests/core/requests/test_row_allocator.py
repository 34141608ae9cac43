"""Rows to issue: lowest first, and none that an open step names."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.requests.row_allocator import RowAllocator
from kvjax.errors import InvariantError


def test_rows_are_issued_from_the_lowest() -> None:
    rows = RowAllocator(3)
    assert [rows.take() for _ in range(3)] == [0, 1, 2]
    rows.give_back(2)
    rows.give_back(0)
    assert rows.num_free == 2
    rows.grow(5)
    rows.check_invariants([1])
    assert [rows.take() for _ in range(4)] == [0, 2, 3, 4]
    rows.check_invariants([0, 1, 2, 3, 4])


@pytest.mark.parametrize("closing", [(0, 1), (1, 0)])
def test_a_row_waits_for_its_last_step(closing: tuple[int, int]) -> None:
    rows = RowAllocator(2)
    assert [rows.take(), rows.take()] == [0, 1]
    steps = [rows.open_step(np.array([0])), rows.open_step(np.array([0, 1]))]
    rows.give_back(0)
    rows.check_invariants([1])
    rows.close_step(steps[closing[0]])
    assert rows.num_free == 0
    rows.check_invariants([1])
    rows.close_step(steps[closing[1]])
    assert rows.num_free == 1
    rows.check_invariants([1])


def test_a_step_closes_once() -> None:
    rows = RowAllocator(1)
    rows.take()
    step = rows.open_step(np.array([0]))
    with pytest.raises(ValueError, match=r"expected the id of an open step, got 7; open: \[0\]"):
        rows.close_step(7)
    rows.close_step(step)
    with pytest.raises(ValueError, match=r"expected the id of an open step, got 0; open: \[\]"):
        rows.close_step(step)


def test_the_checker_sees_broken_laws() -> None:
    rows = RowAllocator(2)
    with pytest.raises(InvariantError, match="R1"):
        rows.check_invariants([0])
    rows._num_fences[1] = 1
    with pytest.raises(InvariantError, match="R2"):
        rows.check_invariants([])
    rows._num_fences[1] = 0
    rows._free.remove(1)
    rows._is_retiring[1] = True
    with pytest.raises(InvariantError, match="R2"):
        rows.check_invariants([])
    rows = RowAllocator(1)
    rows._num_retiring = 1
    with pytest.raises(InvariantError, match="R1: 1 rows counted as retiring"):
        rows.check_invariants([])
