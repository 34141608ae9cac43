"""Blocks of many rows in one sequence: rows in order, managers inner, groups inner, columns innermost."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.tables.column_runs import NO_RUNS, Runs, merge, split


def random_runs(rng: np.random.Generator, num_rows: int, longest: int) -> Runs:
    rows = rng.permutation(num_rows + 3)[:num_rows]
    starts = rng.integers(0, 5, num_rows)
    return Runs.between(rows, starts, starts + rng.integers(-1, longest + 1, num_rows))


def plain_order(runs: list[Runs], num_groups: list[int], num_rows: int) -> list[tuple[int, int, int, int]]:
    """(manager, group, row, column) of every block."""
    order = []
    for i in range(num_rows):
        for manager, (run, groups) in enumerate(zip(runs, num_groups, strict=True)):
            at = np.flatnonzero(run.positions == i)
            for group in range(groups if at.size else 0):
                row, start, count = (int(values[at[0]]) for values in (run.rows, run.starts, run.counts))
                order += [(manager, group, row, start + column) for column in range(count)]
    return order


@pytest.mark.parametrize("longest", [1, 3])
@pytest.mark.parametrize("num_groups", [[1], [3], [1, 2], [2, 1, 3]])
@pytest.mark.parametrize("seed", range(8))
def test_splitting_and_merging_follow_the_plain_order(seed: int, num_groups: list[int], longest: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 7))
    runs = [random_runs(rng, num_rows, longest) for _ in num_groups]
    order = plain_order(runs, num_groups, num_rows)
    block_ids = rng.permutation(len(order)).astype(np.int32)
    shares = split(block_ids, runs, num_groups, num_rows)
    for manager, (run, share) in enumerate(zip(runs, shares, strict=True)):
        rows, columns = run.entries()
        for group in range(num_groups[manager]):
            expected = [
                int(block_ids[order.index((manager, group, row, column))])
                for row, column in zip(rows, columns, strict=True)
            ]
            assert share[group].tolist() == expected
    assert merge(shares, runs, num_rows).tolist() == block_ids.tolist()


def test_a_part_counts_rows_from_its_start() -> None:
    runs = Runs.between(np.array([5, 6, 7, 8]), np.array([0, 2, 2, 1]), np.array([1, 2, 5, 3]))
    assert (runs.positions.tolist(), runs.rows.tolist(), runs.counts.tolist()) == ([0, 2, 3], [5, 7, 8], [1, 3, 2])
    assert runs.part(0, 4) is runs
    part = runs.part(2, 4)
    assert (part.positions.tolist(), part.rows.tolist(), part.num_columns) == ([0, 1], [7, 8], 5)
    assert part.entries()[1].tolist() == [2, 3, 4, 1, 2]
    assert part.entries(descending=True)[1].tolist() == [4, 3, 2, 2, 1]
    assert NO_RUNS.part(1, 3) is NO_RUNS
    assert runs.part(1, 2).num_columns == 0
