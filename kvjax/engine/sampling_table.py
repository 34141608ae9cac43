"""Sampling parameters of the running requests as arrays by row, and the rows of one step as the sampler takes them.

Flow:    SamplingParams -> [SamplingTable] -> SamplingBatch of a step (numpy) -> sampler (jit)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.engine.sampling_params import SamplingParams


class SamplingBatch(NamedTuple):
    """One line per row of logits; a pytree of arrays. Lines of zeros are padding: greedy, their tokens ignored."""

    temperature: np.ndarray  # float32[N], 0: greedy
    top_p: np.ndarray  # float32[N]
    top_k: np.ndarray  # int32[N], 0: all
    seed: np.ndarray  # uint32[N]
    position: np.ndarray  # int32[N] place of the token to sample in its sequence


class SamplingTable:
    """Sampling parameters by row of the request table; rows grow by doubling. Costs a few gathers a step."""

    def __init__(self, num_rows: int = 16) -> None:
        self._columns = SamplingBatch(
            temperature=np.zeros(num_rows, np.float32),
            top_p=np.ones(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            seed=np.zeros(num_rows, np.uint32),
            position=np.zeros(num_rows, np.int32),
        )

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        """Makes `params` those of the request that owns `row`; `seed` is the one that it really uses."""
        while row >= self._columns.seed.size:
            self._columns = SamplingBatch(*(np.tile(column, 2) for column in self._columns))
        self._columns.temperature[row] = params.temperature
        self._columns.top_p[row] = params.top_p
        self._columns.top_k[row] = params.top_k
        self._columns.seed[row] = seed

    def batch(
        self,
        rows: np.ndarray,  # int64[N] rows that sample, in the order of the step's logits
        positions: np.ndarray,  # int[N]
    ) -> SamplingBatch:
        """The lines of `rows` in fresh arrays."""
        temperature, top_p, top_k, seed, _ = self._columns
        return SamplingBatch(temperature[rows], top_p[rows], top_k[rows], seed[rows], np.array(positions, np.int32))
