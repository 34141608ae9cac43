"""Where steps must end so that recurrent states are cached right.

Source:  the law behind vLLM v1/core/sched/scheduler.py (`_mamba_block_aligned_split`)

A block of a recurrent layer is a prefix hit once its tokens are computed, and holds the state where the last step in it
ended. So a step that leaves a block it began inside has to end where that block ends, and another goes on from there.
A step may cross a block's end if it has one token and no more drafts than the kind keeps states for: the state at that
end is then one of those it leaves, in the page of that block. A step from the start of a block may end anywhere: blocks
passed over are not kept.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np

from kvjax.core.tables.ints_or_arrays import IntOrArray


class StateBlocks(NamedTuple):
    """What one kind of recurrent layer asks of steps."""

    block_size: int  # tokens
    num_speculative: int  # drafts that have a state of their own


class StateSteps:
    """The rules of all recurrent groups of one manager; none if there are none."""

    def __init__(self, kinds: tuple[StateBlocks, ...], dropped_tokens: int = 0) -> None:
        """`dropped_tokens`: what EAGLE drops from a hit."""
        self._kinds = kinds
        self._dropped_tokens = dropped_tokens
        self.block_size = lcm(*(kind.block_size for kind in kinds))  # tokens of whole blocks of every kind; 1: no kinds

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def check_step_ends(self, num_computed: IntOrArray, after: IntOrArray) -> None:
        """Checks a step from computed tokens to those after it, of one row as ints or of many as int64[n].

        Raises:
            ValueError: a step leaves a block that it began inside, and does not end there.
        """
        num_new = after - num_computed
        most_new = num_new if isinstance(num_new, int) else np.maximum.reduce(num_new)
        for size, num_speculative in self._kinds:
            if most_new <= 1 + num_speculative:
                continue
            end = -(-num_computed // size) * size
            bad = (num_computed < end) & (end < after) & (num_new > 1 + num_speculative)
            if bad if isinstance(bad, bool) else bad.any():
                computed, last, block_end = (np.atleast_1d(each)[np.argmax(bad)] for each in (num_computed, after, end))
                raise ValueError(
                    f"expected a step from {computed} computed tokens to end at {block_end}, where the block of its "
                    f"recurrent state ends, got {last - computed} new tokens; split it (`limit_step`)"
                )

    def limit(self, num_computed: int, num_new: int, num_tokens: int) -> int:
        """How many of `num_new` tokens after `num_computed` one step should take, for a request of `num_tokens`.

        Steps of a prompt end where a block of every recurrent group ends, up to the last such place that the same
        prompt can hit; 0 if the tokens do not reach one: wait for a larger budget. Steps of decoding stay as they are.
        """
        if not self._kinds or num_computed >= num_tokens - 1:
            return num_new
        after, last = num_computed + num_new, max(num_tokens - self._dropped_tokens, 0)
        last -= last % self.block_size
        if num_computed < last:
            after = min(after // self.block_size * self.block_size, last)
        for size, _ in self._kinds:
            if num_computed % size:
                after = min(after, -(-num_computed // size) * size)
        return max(after - num_computed, 0)
