"""Sampling parameters of the running requests as arrays by row, and the rows of one step as the sampler takes them.

Flow:    EngineRequest -> [SamplingTable] -> SamplingBatch of a step (numpy) -> sampler (jit)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.core import StepPlan
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.sampling.sampler_lines import NO_LINE, SamplerLines, SamplerSizes, SamplerWrites


class SamplingBatch(NamedTuple):
    """One line per row of logits; a pytree of arrays. Lines of zeros are padding: greedy, their tokens ignored."""

    temperature: np.ndarray  # float32[N], 0: greedy
    top_p: np.ndarray  # float32[N]
    top_k: np.ndarray  # int32[N], 0: all
    seed: np.ndarray  # uint32[N]
    position: np.ndarray  # int32[N] place of the token to sample in its sequence
    line: np.ndarray  # int32[N] of the sampler's state, 0: the row asks nothing of it


class SamplingTable:
    """Sampling parameters by row of the request table; rows grow by doubling.

    A step costs a few gathers, unless it is of the same array of rows as the step before and no request has started
    since: then its lines are those of that step.
    """

    def __init__(self, num_rows: int = 16, sizes: SamplerSizes | None = None) -> None:
        """A table of `num_rows` rows at first; without `sizes` no request asks anything of the sampler's state."""
        self._columns = SamplingBatch(
            temperature=np.zeros(num_rows, np.float32),
            top_p=np.ones(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            seed=np.zeros(num_rows, np.uint32),
            position=np.zeros(num_rows, np.int32),
            line=np.zeros(num_rows, np.int32),
        )
        self._lines = None if sizes is None else SamplerLines(sizes)
        self._rows: np.ndarray | None = None  # of the newest step, while its lines are still those of the columns
        self._batch = self._columns

    def start(self, request: EngineRequest) -> None:
        """`request` runs in its row from here on."""
        line = NO_LINE if self._lines is None else self._lines.start(request)
        self.set(request.request.row, request.params, request.seed, line)

    def set(self, row: int, params: SamplingParams, seed: int, line: int = NO_LINE) -> None:
        """Makes `params` those of the request that owns `row`; `seed` is the one that it really uses."""
        while row >= self._columns.seed.size:
            self._columns = SamplingBatch(*(np.tile(column, 2) for column in self._columns))
        self._rows = None
        self._columns.temperature[row] = params.temperature
        self._columns.top_p[row] = params.top_p
        self._columns.top_k[row] = params.top_k
        self._columns.seed[row] = seed
        self._columns.line[row] = line

    def batch(
        self,
        rows: np.ndarray,  # int64[N] rows that sample, in the order of the step's logits; kept: do not write to it
        positions: np.ndarray,  # int[N]
    ) -> SamplingBatch:
        """The lines of `rows`, read-only but for `position`."""
        if rows is not self._rows:
            self._batch = SamplingBatch(*[column[rows] for column in self._columns])
            for column in self._batch:
                column.flags.writeable = False
            self._rows = rows
        return self._batch._replace(position=np.array(positions, np.int32))

    def empty_batch(self) -> SamplingBatch:
        """Lines of no rows: an example of a step's inputs, to compile for."""
        nothing = np.zeros(0, np.int64)
        return self.batch(nothing, nothing)

    def wants_best(self, batch: SamplingBatch) -> bool:
        """Whether a row of a step asks for log-probabilities of best tokens."""
        return self._lines is not None and not self._lines.is_idle and self._lines.want_best(batch.line)

    def writes(self, plan: StepPlan, samples: np.ndarray) -> SamplerWrites | None:
        """What a step's plan, and those of its requests that sample (bool[S]), write into the sampler's state first."""
        if self._lines is None or self._lines.is_idle:
            return None
        return self._lines.take(plan, self._columns.line[plan.rows], samples)
