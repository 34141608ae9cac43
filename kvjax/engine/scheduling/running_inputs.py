"""Inputs of running requests: which rows of the embedding buffer stand for their tokens, and where tokens stand.

Flow:    Scheduler starts and stops requests -> [RunningInputs] -> HostLoop: StepInputs of each step

A request takes rows for the vectors that it has still to compute when it gets its blocks, all of them or none. They
are written before its first step, and free for others once the step with the last of them is planned: the device works
in order. One that is preempted gives its rows up, and takes new ones when it comes back.

Invariants (`check_invariants`):

    I1  a row of the buffer is free or taken by one request that runs or loads
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvjax.core import MRopePositions, StepPlan
from kvjax.engine.requests.request_inputs import NO_INPUTS, RequestInputs
from kvjax.errors import InvariantError

NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class _Taken:
    """Rows of one request, for the vectors at rising places of its prompt."""

    places: np.ndarray  # int64[n]
    rows: np.ndarray  # int32[n] of the buffer


@dataclass(frozen=True)
class StepInputs:
    """What the device gets with one step's plan."""

    features: tuple[np.ndarray, ...] = ()  # of requests whose encoder runs, in the plan's order
    embed_index: np.ndarray | None = None  # int32[T] -1: a token; None: all are
    embed_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)  # int32[k] rows to write first
    embeds: np.ndarray | None = None  # float32[k, dim] what to write there


NO_STEP_INPUTS = StepInputs()


class RunningInputs:
    """By row of the request table. Owned by one scheduler; costs nothing for requests of text."""

    def __init__(self, num_embedding_rows: int = 0, *, has_mrope: bool = False) -> None:
        self.mrope = MRopePositions() if has_mrope else None
        self._inputs: dict[int, RequestInputs] = {}  # of rows whose requests have any
        self._taken: dict[int, _Taken] = {}
        self._num_rows = num_embedding_rows
        self._free = np.arange(num_embedding_rows, dtype=np.int32)  # used from the front, given back at the end
        self._to_write: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # rows, vectors

    def fits(self, inputs: RequestInputs) -> bool:
        """Whether there are rows for all vectors of a request."""
        return inputs.places.size <= self._free.size

    def start(self, row: int, inputs: RequestInputs, num_computed_tokens: int) -> None:
        """A request owns `row` from here on, with so many tokens computed; its vectors fit."""
        if inputs is NO_INPUTS:
            return
        self._inputs[row] = inputs
        if self.mrope is not None and inputs.prompt_positions is not None:
            self.mrope.set(row, inputs.prompt_positions)
        count = inputs.num_embeds_from(num_computed_tokens)
        if count and inputs.embeds is not None:
            rows, self._free = self._free[:count], self._free[count:]
            self._taken[row] = _Taken(inputs.places[-count:], rows)
            self._to_write[row] = rows, inputs.embeds[-count:]

    def stop(self, row: int) -> None:
        """The request gives `row` up."""
        if self._inputs.pop(row, None) is None:
            return
        self._release(row)
        if self.mrope is not None:
            self.mrope.clear(row)

    def take(self, plan: StepPlan) -> StepInputs:
        """What the device gets with a plan; rows whose vectors it computes are free then."""
        if not self._inputs:
            return NO_STEP_INPUTS
        features = [self._inputs[row].encoder_features for row in _encoding_rows(plan)]
        written, self._to_write = list(self._to_write.values()), {}
        return StepInputs(
            features=tuple(one for one in features if one is not None),
            embed_index=self._embed_index(plan) if self._taken else None,
            embed_rows=np.concatenate([NO_ROWS, *(rows for rows, _ in written)]),
            embeds=np.concatenate([embeds for _, embeds in written]) if written else None,
        )

    def _embed_index(self, plan: StepPlan) -> np.ndarray:  # int32[T]
        index = np.full(plan.num_tokens, -1, np.int32)
        for row, taken in list(self._taken.items()):
            if not (places := np.flatnonzero(plan.rows == row)).size:
                continue
            i = places.item()
            first = int(plan.num_computed_tokens[i])
            after = first + int(plan.num_new_tokens[i])
            begin, end = np.searchsorted(taken.places, [first, after])
            index[plan.query_start_loc[i] + taken.places[begin:end] - first] = taken.rows[begin:end]
            if end == taken.places.size:
                self._release(row)
        return index

    def _release(self, row: int) -> None:
        self._to_write.pop(row, None)
        taken = self._taken.pop(row, None)
        if taken is not None:
            self._free = np.concatenate([self._free, taken.rows])

    def check_invariants(self) -> None:
        """Checks I1.

        Raises:
            InvariantError: it does not hold.
        """
        rows = np.concatenate([self._free, *(taken.rows for taken in self._taken.values())])
        if np.sort(rows).tolist() != list(range(self._num_rows)) or not self._taken.keys() <= self._inputs.keys():
            raise InvariantError(f"I1: expected each of {self._num_rows} embedding rows once, got {sorted(rows)}")


def _encoding_rows(plan: StepPlan) -> list[int]:
    """Rows of the requests whose encoder runs in the step, in the plan's order."""
    starts = next((group.encoder_starts for group in plan.groups if group.encoder_starts is not None), None)
    return [] if starts is None else plan.rows[np.diff(starts) > 0].tolist()


__all__ = ["RunningInputs", "StepInputs"]
