"""What the device gives of a step, as the host reads it.

Flow:    ModelRunner.read -> [SampledStep] -> HostLoop.end_step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.engine.requests.outputs import TopLogprobs


@dataclass(frozen=True)
class SampledStep:
    """The tokens of one step. Arrays of several data ranks have equal parts, rank after rank."""

    token_ids: np.ndarray  # int32[>= rows of logits]
    logprobs: np.ndarray  # float32[likewise]
    best: TopLogprobs | None = None  # of the rows of logits; None: not asked for
    num_accepted: np.ndarray | None = None  # int32[>= requests that sample] drafts that were right; None: no drafts
    given: tuple[np.ndarray, TopLogprobs] | None = None  # what `GivenTokens.put` takes; None: not asked for

    def of_rank(self, rank: int, num_ranks: int) -> SampledStep:
        """The part of a data rank."""

        def own(array: np.ndarray) -> np.ndarray:
            return part_of(array, rank, num_ranks)

        def own_best(best: TopLogprobs) -> TopLogprobs:
            return TopLogprobs(own(best.token_ids), own(best.logprobs), own(best.ranks))

        return SampledStep(
            own(self.token_ids),
            own(self.logprobs),
            best=None if self.best is None else own_best(self.best),
            num_accepted=None if self.num_accepted is None else own(self.num_accepted),
            given=None if self.given is None else (own(self.given[0]), own_best(self.given[1])),
        )


def part_of(array: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """What of an array belongs to a rank, whose parts lie one after another."""
    size = array.shape[0] // num_ranks
    return array[rank * size : (rank + 1) * size]


__all__ = ["SampledStep", "part_of"]
