"""Rows of the embedding buffer among running requests, by counting. No jax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvjax.engine.requests.request_inputs import NO_INPUTS, RequestInputs
from kvjax.engine.scheduling.running_inputs import RunningInputs
from kvjax.errors import InvariantError


def inputs_at(places: list[int], seed: int = 0) -> RequestInputs:
    embeds = np.random.default_rng(seed).standard_normal((len(places), 2)).astype(np.float32)
    return RequestInputs(embeds=embeds, places=np.array(places))


def plan_of(*requests: tuple[int, int, int]) -> Any:
    """Of (row, computed tokens, new tokens)."""
    rows, computed, new = (np.array(column) for column in zip(*requests, strict=True))
    starts = np.concatenate([[0], np.cumsum(new)])
    return SimpleNamespace(
        rows=rows,
        num_computed_tokens=computed,
        num_new_tokens=new,
        query_start_loc=starts,
        num_tokens=int(starts[-1]),
        groups=(),
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_computed_placeholder_reads_its_own_vector(seed: int) -> None:
    """The model of the device: an array that steps read in order. Requests start, go on in chunks, stop anywhere."""
    rng = np.random.default_rng(seed)
    running, device = RunningInputs(12), np.zeros((12, 2), np.float32)
    requests: dict[int, tuple[RequestInputs, int]] = {}  # by row: inputs, computed tokens
    for step in range(60):
        for row in range(5):
            if row not in requests and rng.random() < 0.5:
                places = np.flatnonzero(rng.random(16) < rng.choice([0, 0.4])).tolist()
                inputs = inputs_at(places, step) if places else NO_INPUTS
                if running.fits(inputs):
                    computed = int(rng.integers(0, 16))
                    running.start(row, inputs, computed)
                    requests[row] = (inputs, computed)
            elif row in requests and rng.random() < 0.1:
                running.stop(row)
                del requests[row]
        chosen = [row for row in requests if rng.random() < 0.8]
        if not chosen:
            continue
        counts = rng.integers(1, 7, len(chosen)).tolist()
        rows = [(row, requests[row][1], count) for row, count in zip(chosen, counts, strict=True)]
        given = running.take(plan_of(*rows))
        running.check_invariants()
        if given.embeds is not None:
            device[given.embed_rows] = given.embeds
        expected: list[np.ndarray | None] = []
        for row, computed, count in rows:
            inputs = requests[row][0]
            for place in range(computed, computed + count):
                at = np.flatnonzero(inputs.places == place)
                expected.append(inputs.embeds[at.item()] if at.size and inputs.embeds is not None else None)
            requests[row] = (inputs, computed + count)
        index = [-1] * len(expected) if given.embed_index is None else given.embed_index.tolist()
        assert [i >= 0 for i in index] == [vector is not None for vector in expected]
        for i, vector in zip(index, expected, strict=True):
            assert vector is None or device[i].tolist() == vector.tolist()
    for row in list(requests):
        running.stop(row)
    assert running.fits(inputs_at(list(range(12))))
    assert not running.fits(inputs_at(list(range(13))))


def test_requests_of_text_cost_no_array() -> None:
    running = RunningInputs(4)
    running.start(0, NO_INPUTS, 0)
    given = running.take(plan_of((0, 0, 3)))
    assert (given.features, given.embed_index, given.embeds) == ((), None, None)


def test_vectors_of_a_request_that_gave_up_its_row_are_not_written() -> None:
    """Its rows are another's by then, and a device writes a step's vectors in any order."""
    running, other = RunningInputs(4), inputs_at([0, 1, 2], 1)
    running.start(0, inputs_at([0, 1, 2]), 0)
    running.stop(0)
    running.start(1, other, 0)
    given = running.take(plan_of((1, 0, 3)))
    assert len(set(given.embed_rows.tolist())) == given.embed_rows.size == 3
    np.testing.assert_array_equal(given.embeds, other.embeds)


def test_a_row_that_is_lost_is_found_out() -> None:
    running = RunningInputs(4)
    running.start(0, inputs_at([0, 1]), 0)
    running._taken.clear()
    with pytest.raises(InvariantError, match="I1: expected each of 4 embedding rows once"):
        running.check_invariants()
