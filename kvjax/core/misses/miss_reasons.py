"""Why a lookup found no more of a prompt than it did: a reason for every token.

Flow:    KVCacheManager.get_computed_blocks -> [MissReasons] -> LookupReport, counts -> kvjax.metrics, kvjax replay

    reasons = MissReasons()
    manager = KVCacheManager(config, max_model_len, block_size, miss_reasons=reasons)
    manager.get_computed_blocks(request)
    reasons.last  # LookupReport(num_hit_tokens=512, num_missed_tokens={EVICTED: 256, NEVER_SEEN: 240}, ...)

Behind the hit the tokens of a prompt fall to these reasons, in this order; hit and reasons together are all of it:

    not_yet_computed   the hit would reach here in the next step (`same_step_hits=False`, Mamba)
    evicted            likewise if no block had been reused for other contents
    invalidated        likewise if none had been dropped by `invalidate`, `evict_blocks` or `reset_prefix_cache` either
    other_salt         likewise if salt, adapter and weight version made no difference either
    never_seen         no cache had these blocks, or they were evicted longer ago than is remembered
    dropped_block      nothing can be hit here: EAGLE computes the last block of a hit again
    last_token         nothing can be hit here: the last token of a prompt is always computed, and with it its block
    below_granularity  nothing can be hit here: hits are whole blocks, of several sizes their common multiple
    lookup_off         no token was looked up: caching is off, no kind has a cache, the request asks for none, or names
                       no input to the encoder

A hit is one that all groups accept, so these are lengths of hits, not states of single blocks: a token counts as
evicted where the hit that reaches it lacks nothing but evicted blocks. Apart from that, `limited_by`
names the groups that alone accept less than another group does. With `sub_block_hits` all this is told of
whole blocks still; a hit that reaches into one takes its tokens from the first reasons.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.misses.lookup_states import ELSEWHERE, EVICTED, FRESH, INVALIDATED, LookupStates
from kvjax.core.misses.seen_origins import SeenOrigins
from kvjax.core.requests.request import Request
from kvjax.core.watch.evicted_blocks import EvictedBlock, EvictedBlocks
from kvjax.core.watch.recent_lookups import RecentLookups


class MissReason(StrEnum):
    """Why a token was not found, in the order behind the hit."""

    NOT_YET_COMPUTED = "not_yet_computed"
    EVICTED = "evicted"
    INVALIDATED = "invalidated"
    OTHER_SALT = "other_salt"
    NEVER_SEEN = "never_seen"
    DROPPED_BLOCK = "dropped_block"
    LAST_TOKEN = "last_token"
    BELOW_GRANULARITY = "below_granularity"
    LOOKUP_OFF = "lookup_off"


@dataclass(frozen=True)
class LookupReport:
    """One lookup."""

    request_id: str
    num_tokens: int  # of the request
    num_hit_tokens: int
    num_missed_tokens: Mapping[MissReason, int]  # those that apply, in the order behind the hit
    group_hit_tokens: Mapping[int, int] = field(default_factory=dict)  # by group with a cache: what it alone accepts
    evicted: EvictedBlock | None = None  # of the evicted and invalidated blocks that a longer hit lacks, the first gone

    @property
    def reason(self) -> MissReason:
        """Why the token behind the hit was not found."""
        return next(iter(self.num_missed_tokens))

    @property
    def limited_by(self) -> tuple[int, ...]:
        """Groups that alone accept fewer tokens than another one; none where all lack the same."""
        return tuple(self.num_tokens_short)

    @property
    def num_tokens_short(self) -> dict[int, int]:
        """By group that limits the hit: how many tokens less than the best group it accepts."""
        most = max(self.group_hit_tokens.values(), default=0)
        return {group_id: most - tokens for group_id, tokens in self.group_hit_tokens.items() if tokens < most}


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
        had = states.longest(INVALIDATED)
        self._add(
            LookupReport(
                request.request_id,
                request.num_tokens,
                num_hit_tokens,
                _missed_tokens(states, request.num_tokens, num_hit_tokens),
                states.longest_by_group(),
                states.oldest_eviction(had) if had > num_hit_tokens else None,
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
        MissReason.EVICTED: states.longest(EVICTED),
        MissReason.INVALIDATED: states.longest(INVALIDATED),
        MissReason.OTHER_SALT: states.longest(ELSEWHERE),
        MissReason.NEVER_SEEN: states.max_length,
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
