"""Why the prompts of a replay missed: tokens by reason, counted once for each request, when it is first admitted.

Flow:    MissReasons.reports -> [MissCounts.of] -> kvjax.replay.reports.report;   counts -> [miss_table] -> terminal
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvjax.core.misses.lookup_report import LookupReport, MissReason
from kvjax.text import align_table


@dataclass
class MissCounts:
    """Totals so far. With the hit tokens, `tokens` add up to the prompts."""

    tokens: Counter[MissReason] = field(default_factory=Counter)
    tokens_short: Counter[int] = field(default_factory=Counter)  # by group: less than the best group would have hit
    evicted_seconds_ago: list[float] = field(default_factory=list)  # of each lookup that lacked evicted blocks ...
    evicted_blocks_ago: list[int] = field(default_factory=list)  # ... of the one that went first
    blocks_short: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # likewise, by pool

    @classmethod
    def of(cls, reports: Iterable[LookupReport]) -> MissCounts:
        """Counts lookups, one of each request."""
        counts = cls()
        for report in reports:
            counts._add(report)
        return counts

    def _add(self, report: LookupReport) -> None:
        self.tokens.update(report.num_missed_tokens)
        self.tokens_short.update(report.num_tokens_short)
        for pool_id, num_blocks in report.num_blocks_short.items():
            self.blocks_short[pool_id].append(num_blocks)
        if report.num_evicted_tokens and report.evicted is not None:
            self.evicted_seconds_ago.append(report.evicted.seconds_since)
            self.evicted_blocks_ago.append(report.evicted.num_evicted_since)


def miss_table(num_found: int, num_missed: Mapping[str, int]) -> str:
    """Prompt tokens that were found, and those that were missed, a line per reason."""
    total = max(num_found + sum(num_missed.values()), 1)
    rows = [["found", f"{num_found:,}", f"{num_found / total:.2%}", ""]]
    for name, count in num_missed.items():
        rows.append([name.replace("_", " "), f"{count:,}", f"{count / total:.2%}", MissReason(name).remedy])
    return align_table(["prompt tokens", "number", "share", "what would have kept them"], rows, left={0, 3})


__all__ = ["MissCounts", "miss_table"]
