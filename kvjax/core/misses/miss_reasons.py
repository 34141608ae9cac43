"""Why a lookup found no more of a prompt than it did: a reason for every token.

Flow:    KVCacheManager.get_computed_blocks -> [MissReasons] -> LookupReport, counts -> kvjax.metrics, kvjax replay

    reasons = MissReasons()
    manager = KVCacheManager(config, max_model_len, block_size, miss_reasons=reasons)
    manager.get_computed_blocks(request)
    reasons.last  # LookupReport(num_hit_tokens=512, num_missed_tokens={EVICTED: 256, NEVER_SEEN: 240}, ...)
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.misses.lookup_report import LookupReport, MissReason
from kvjax.core.misses.lookup_states import (
    CHECKPOINT_EVICTED,
    ELSEWHERE,
    EVICTED,
    FRESH,
    INVALIDATED,
    LookupStates,
)
from kvjax.core.misses.seen_origins import SeenOrigins
from kvjax.core.requests.request import Request
from kvjax.core.watch.computed_blocks import ComputedBlocks
from kvjax.core.watch.evicted_blocks import EvictedBlocks
from kvjax.core.watch.recent_lookups import RecentLookups


class MissReasons:
    """Explains the lookups of one manager: some 200 us each, and 1 us for every block that is not cached.

    An observer: not part of the manager's state. `last` is of every lookup. Reports are kept, and tokens counted, of
    requests that are admitted, of each the last lookup before: one that waits counts once, however often it is looked
    up, and one that is admitted again after a preemption no more.
    """

    def __init__(
        self,
        max_evicted_blocks: int = 65_536,
        max_prefixes: int = 4_096,
        max_reports: int = 1_024,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Nothing seen yet.

        Args:
            max_evicted_blocks: how many evicted blocks of each pool to remember, 250 bytes each.
            max_prefixes: how many first blocks of prompts, to tell other salts: 4 origins of each, 300 bytes an origin.
            max_reports: how many of the latest reports to keep, of admitted and of waiting requests; 1 KiB each.
            clock: nanoseconds.

        Raises:
            ValueError: a number is below 1.
        """
        for name, value in (
            ("max_evicted_blocks", max_evicted_blocks),
            ("max_prefixes", max_prefixes),
            ("max_reports", max_reports),
        ):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.max_evicted_blocks = max_evicted_blocks
        self._clock = clock
        self._seen = SeenOrigins(max_prefixes)
        self._groups: GroupManagers | None = None
        self._waiting: RecentLookups[LookupReport] = RecentLookups(max_reports)
        self.last: LookupReport | None = None  # the latest lookup
        self.num_lookups = 0
        self.reports: deque[LookupReport] = deque(maxlen=max_reports)  # the latest first admissions, oldest first
        self.num_admitted = 0
        self.num_hit_tokens = 0
        self.num_missed_tokens: Counter[MissReason] = Counter()
        self.num_tokens_short: Counter[int] = Counter()  # by group: less than the best group accepted

    def attach(self, groups: GroupManagers) -> None:
        """Watches the pools of a manager, whose groups these are.

        Raises:
            ValueError: it watches another manager already.
        """
        if self._groups is not None:
            raise ValueError("expected a MissReasons of its own for each manager, got one that watches another")
        self._groups = groups
        for pool in groups.pools:
            pool.prefix_index.evicted = EvictedBlocks(self.max_evicted_blocks, self._clock)
        if groups.cacheable and all(manager.forgets for manager in groups.cacheable):
            groups.cacheable[0].computed_blocks = ComputedBlocks(self.max_evicted_blocks)

    def explain_off(self, request: Request) -> None:
        """Reports a request that was not looked up."""
        missed = {MissReason.LOOKUP_OFF: request.num_tokens}
        self._add(LookupReport(request.request_id, request.num_tokens, 0, missed))

    def explain(self, request: Request, num_hit_tokens: int) -> None:
        """Reports a lookup that has just found so many tokens."""
        groups = self._groups
        assert groups is not None  # the manager that calls this is attached
        if not groups.cacheable:
            self.explain_off(request)
            return
        # where salts name the encoder's input, another salt is another input
        others = [] if groups.reads_encoder else self._seen.meet(request)
        states = LookupStates(groups, request, others)
        had, kept = states.longest(INVALIDATED), states.longest(EVICTED)
        self._add(
            LookupReport(
                request.request_id,
                request.num_tokens,
                num_hit_tokens,
                _missed_tokens(states, request.num_tokens, num_hit_tokens),
                states.longest_by_group(),
                states.oldest_eviction(had) if had > num_hit_tokens else None,
                states.blocks_short(kept) if kept > num_hit_tokens else {},
            )
        )

    def _add(self, report: LookupReport) -> None:
        self.last = report
        self.num_lookups += 1
        self._waiting.note(report.request_id, report)

    def count_admission(self, request: Request) -> None:
        """Counts the latest lookup, if there was any, of a request that has got slots and had none before."""
        report = self._waiting.take(request.request_id)
        if report is None or request.num_preemptions:
            return
        self.reports.append(report)
        self.num_admitted += 1
        self.num_hit_tokens += report.num_hit_tokens
        self.num_missed_tokens.update(report.num_missed_tokens)
        self.num_tokens_short.update(report.num_tokens_short)


def _missed_tokens(states: LookupStates, num_tokens: int, num_hit_tokens: int) -> dict[MissReason, int]:
    """Tokens by reason: each reaches from where the one before ends to its own end."""
    ends = {
        MissReason.NOT_YET_COMPUTED: states.longest(FRESH),
        MissReason.CHECKPOINT_EVICTED: states.longest(CHECKPOINT_EVICTED),
        MissReason.EVICTED: states.longest(EVICTED),
        MissReason.INVALIDATED: states.longest(INVALIDATED),
        MissReason.NO_CHECKPOINT: states.longest_computed(INVALIDATED),
        MissReason.OTHER_SALT: states.longest_computed(ELSEWHERE),
        MissReason.NEVER_SEEN: states.max_length,
        MissReason.ANSWER_OF_RSWA: states.max_length_with_answer,
        MissReason.DROPPED_BLOCK: states.max_length_without_drops,
        MissReason.LAST_TOKEN: states.max_length_without_last_token,
        MissReason.BELOW_GRANULARITY: num_tokens,
    }
    missed, start = {}, num_hit_tokens
    for reason, end in ends.items():
        if end > start:
            missed[reason] = end - start
            start = end
    return missed
