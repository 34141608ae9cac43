"""Why the prompts of a replay missed: tokens by reason, counted once for each request, when it is first admitted.

Flow:    MissReasons.last -> [MissCounts.count] -> kvjax.replay.report

A request that waits is looked up before every step; only the lookup that admits it counts, as for hits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvjax.core.misses.miss_reasons import LookupReport, MissReason


@dataclass
class MissCounts:
    """Totals so far. With the hit tokens, `tokens` add up to the prompts."""

    tokens: Counter[MissReason] = field(default_factory=Counter)
    tokens_short: Counter[int] = field(default_factory=Counter)  # by group: less than the best group would have hit
    evicted_seconds_ago: list[float] = field(default_factory=list)  # of each lookup that lacked evicted blocks ...
    evicted_blocks_ago: list[int] = field(default_factory=list)  # ... of the one that went first

    def count(self, report: LookupReport) -> None:
        """Adds a lookup."""
        self.tokens.update(report.num_missed_tokens)
        self.tokens_short.update(report.num_tokens_short)
        if MissReason.EVICTED in report.num_missed_tokens and report.evicted is not None:
            self.evicted_seconds_ago.append(report.evicted.seconds_since)
            self.evicted_blocks_ago.append(report.evicted.num_evicted_since)
