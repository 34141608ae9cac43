"""Steps in flight against a list of them in plain Python: what is pending, unread and left, and where tokens are."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request, RequestTable, StepsInFlight

PROMPT = 40


def table_of(num_requests: int) -> RequestTable:
    table = RequestTable(2)
    for i in range(num_requests):
        table.add(Request(f"r{i}", range(PROMPT)))
    return table


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_list_of_steps(seed: int) -> None:
    """The model: one (row -> tokens, sampling rows) a step in flight, and tokens by row."""
    rng, table = np.random.default_rng(seed), table_of(6)
    flights = StepsInFlight(table)
    steps: list[tuple[dict[int, int], list[int]]] = []
    tokens, computed = dict.fromkeys(range(6), PROMPT), dict.fromkeys(range(6), 0)
    for _ in range(60):
        if len(steps) < 3 and rng.random() < 0.6:
            if len(table) < 40 and rng.random() < 0.3:  # the table grows while steps are in flight
                new = table.add(Request(f"r{len(table)}", range(PROMPT)))
                tokens[new], computed[new] = PROMPT, 0
            rows = rng.permutation([row for row in tokens if tokens[row] > computed[row] or pending(steps, row)])
            step = {int(row): int(rng.integers(1, 20)) for row in rows[: rng.integers(1, 7)]}
            step = {row: min(n, tokens[row] + pending(steps, row) - computed[row]) for row, n in step.items()}
            step = {row: n for row, n in step.items() if n}
            if not step:
                continue
            samples = [row for row, n in step.items() if computed[row] + n == tokens[row] + pending(steps, row)]
            flights.start(np.array(list(step)), np.array(list(step.values())), np.array(samples, np.int64))
            steps.append((step, samples))
            for row, n in step.items():
                computed[row] += n
        elif steps:
            _, samples = steps.pop(0)
            read = flights.read()
            assert read.tolist() == samples
            table.append_tokens(read, np.full(read.size, 7))
            for row in samples:
                tokens[row] += 1
        rows = np.array(list(tokens))
        assert len(flights) == len(steps)
        assert np.broadcast_to(flights.num_pending(rows), rows.shape).tolist() == [pending(steps, row) for row in rows]
        unread = [sum(step.get(row, 0) for step, _ in steps) for row in rows.tolist()]
        assert np.broadcast_to(flights.num_unread(rows), rows.shape).tolist() == unread
        left = [tokens[row] + pending(steps, row) - computed[row] for row in rows.tolist()]
        assert flights.num_left(rows).tolist() == left
        source = flights.token_source(rows)
        assert (source is None) == (not steps)
        if source is not None:
            newest = steps[-1][1]
            assert source.tolist() == [newest.index(row) if row in newest else -1 for row in rows.tolist()]


def pending(steps: list[tuple[dict[int, int], list[int]]], row: int) -> int:
    return sum(row in samples for _, samples in steps)


def test_a_step_that_cannot_start_changes_nothing() -> None:
    table = table_of(2)
    flights = StepsInFlight(table)
    with pytest.raises(ValueError, match="row"):
        flights.start(np.array([0, 9]), np.array([1, 1]), np.array([0]))
    assert len(flights) == 0
    assert table.num_computed_tokens.tolist() == [0, 0]


def test_reading_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a step in flight to read, got none"):
        StepsInFlight(table_of(1)).read()
