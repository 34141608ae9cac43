"""A step of several data ranks as the device takes it: every rank's numbers moved to its place among all.

Flow:    RankSteps -> [DeviceInputs.of] -> UpdateStep.call_ranks

Lines of the sampler's state are those of rank 0, then of rank 1, and so on; so are tokens of the step before. Line 0 of
every rank changes nothing, and all use that of rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvjax.core import StepPlan
from kvjax.engine.sampling.sampler_lines import NO_LINE, SamplerSizes, SamplerWrites
from kvjax.engine.sampling.sampling_table import SamplingBatch
from kvjax.engine.step.rank_loops import RankSteps


@dataclass(frozen=True)
class DeviceInputs:
    """What one step is dispatched with, rank by rank."""

    plans: list[StepPlan | None]
    sampling: list[SamplingBatch]
    given: list[np.ndarray | None]
    sampler_writes: list[SamplerWrites]

    @classmethod
    def of(cls, steps: RankSteps, sizes: SamplerSizes | None, num_previous: int) -> DeviceInputs:
        """The inputs of all ranks, each with so many lines of the sampler's state and tokens of the step before."""
        num_lines = 0 if sizes is None else sizes.num_lines
        made = cls([], [], [], [])
        for rank, step in enumerate(steps.by_rank):
            made.plans.append(None if step is None else step.plan)
            sampling = steps.idle_sampling if step is None else step.sampling
            made.sampling.append(sampling._replace(line=_moved(sampling.line, rank * num_lines)))
            made.given.append(None if step is None or step.given is None else step.given.token_ids)
            if step is not None and step.sampler_writes is not None:
                made.sampler_writes.append(_moved_writes(step.sampler_writes, rank * num_lines, rank * num_previous))
        return made


def sizes_of_ranks(sizes: SamplerSizes, num_ranks: int) -> SamplerSizes:
    """The sizes with the lines of all ranks."""
    return replace(sizes, num_lines=sizes.num_lines * num_ranks)


def _moved(lines: np.ndarray, offset: int) -> np.ndarray:
    return np.where(lines == NO_LINE, lines, lines + offset).astype(lines.dtype)


def _moved_writes(writes: SamplerWrites, offset: int, first_source: int) -> SamplerWrites:
    """The same writes of the lines of a rank."""
    tokens = writes.tokens
    if tokens is not None:
        source = np.where(tokens.source >= 0, tokens.source + first_source, tokens.source).astype(np.int32)
        tokens = replace(tokens, lines=_moved(tokens.lines, offset), source=source)
    return SamplerWrites(
        lines=tuple(replace(one, line=one.line + offset) for one in writes.lines),
        masks=tuple((line + offset, mask) for line, mask in writes.masks),
        tokens=tokens,
    )


__all__ = ["DeviceInputs", "sizes_of_ranks"]
