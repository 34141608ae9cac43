"""How many drafts of a step each request gets: what tokens and blocks are left once all else has its share.

Flow:    Scheduler: rows of the next step, budget left -> [DraftShares] -> blocks for drafts, drafts of each row

A draft may be in vain, so all that is certain comes first: the tokens and chunks of prompts of running requests, then
admissions. What they leave of the step's budget is levelled: nobody gets a further draft before others that could use
one have as many. Blocks for drafts are allocated last, in order of urgency; when a row's do not fit, it and those
behind it go without, and nobody is preempted.

A request can use drafts once it decodes and has a token of its own: as many as leave room for the token that the step
samples behind them, and as the manager lets one step verify (`limit_drafts`). None where a matcher must see each token
before the next is sampled.
"""

from __future__ import annotations

import numpy as np

from kvjax.core import KVCacheManager
from kvjax.engine.scheduling.running_rows import RunningRows
from kvjax.engine.scheduling.speculation import Drafter


class DraftShares:
    """The drafts of one scheduler's requests."""

    def __init__(self, manager: KVCacheManager, by_row: RunningRows, drafter: Drafter, num_drafts: int) -> None:
        self._manager = manager
        self._table = manager.request_table
        self._by_row = by_row
        self._drafter = drafter
        self._num_drafts = num_drafts

    def allocate(
        self,
        rows: np.ndarray,  # int64[S] of the step, in order of urgency; blocks for their tokens are allocated
        num_new_tokens: np.ndarray,  # int64[S]
        samples: np.ndarray,  # bool[S]
        budget: int,  # tokens that the step has left
    ) -> np.ndarray | None:  # int64[S]
        """Drafts of each row, whose blocks are allocated; None: none of any."""
        if not budget:
            return None
        num_tokens = self._table.num_tokens[rows]
        limits = np.minimum(self._by_row.max_total_tokens[rows] - num_tokens - 1, self._num_drafts)
        limits[(num_new_tokens > 1) | ~samples | (num_tokens == self._table.num_prompt_tokens[rows])] = 0
        limits[self._by_row.waits_for_token[rows]] = 0
        limits = self._manager.limit_drafts(rows, np.maximum(limits, 0))
        able = (limits > 0).nonzero()[0]
        if not able.size:
            return None
        counts = levelled(self._drafter.count(rows[able], limits[able]), budget)
        drafted = counts.nonzero()[0]
        if not drafted.size:
            return None
        counts, able = counts[drafted], able[drafted]
        num_planned = self._manager.plan_step(rows[able], 1 + counts).num_planned
        if not num_planned:
            return None
        num_drafts = np.zeros(rows.size, np.int64)
        num_drafts[able[:num_planned]] = counts[:num_planned]
        return num_drafts


def levelled(wanted: np.ndarray, budget: int) -> np.ndarray:  # int64[n] each
    """`wanted`, cut to a level so that they sum to at most `budget`; what is left goes to the first that want more."""
    level = int(wanted.max(initial=0))
    if int(wanted.sum()) <= budget:
        return wanted
    while (cut := np.minimum(wanted, level)).sum() > budget:
        level -= 1
    more = (wanted > level).nonzero()[0][: budget - int(cut.sum())]
    cut[more] += 1
    return cut


__all__ = ["DraftShares", "levelled"]
