"""Why lookups miss: every report against a search by brute force that remembers all that was ever cached."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import pytest

from kvjax.core import EvictedBlock, KVCacheBlocks, KVCacheManager, LookupReport, MissReason, MissReasons, Request
from kvjax.core.misses.lookup_states import (
    CACHED,
    CHECKPOINT_EVICTED,
    ELSEWHERE,
    EVICTED,
    FRESH,
    INVALIDATED,
    UNKNOWN,
)
from kvjax.core.misses.seen_origins import MAX_ORIGINS
from kvjax.core.record.call_recorder import CallRecorder
from kvjax.core.record.call_replay import replay_calls
from tests.core.manager.manager_lockstep import FULL, HYBRID, SETUPS, WINDOW, Pair, Setup
from tests.core.manager.naive_manager import NaiveRequest
from tests.core.manager.test_invalidation import HASHER, RandomInvalidation, compute, request

R = MissReason


class RandomMisses(RandomInvalidation):
    """Before each lookup, why it will miss: from the naive model's blocks and its list of all that it ever forgot."""

    def __init__(self, setup: Setup, seed: Any, max_evicted: int) -> None:
        self.now_ns = 0
        self.max_evicted = max_evicted
        self.reasons = MissReasons(max_evicted_blocks=max_evicted, clock=lambda: self.now_ns)
        super().__init__(setup, seed, miss_reasons=self.reasons)
        self.naive = self.both.naive
        self.cacheable = [i for i, group in enumerate(setup.groups) if not group.cross]
        self.alignment = lcm(*(setup.groups[i].block_size for i in self.cacheable))
        self.origins: dict[tuple, list[tuple]] = {}  # first tokens -> (salt, origin), latest last
        self.forgotten_at: list[list[int]] = [[] for _ in self.naive.pools]
        self.plain_lookup = self.both.lookup
        self.both.lookup = self.lookup  # type: ignore[method-assign]
        self.met: set[MissReason] = set()

    def call(self) -> None:
        self.now_ns += 1_000_000_000
        super().call()
        self.note_times()

    def note_times(self) -> None:
        for pool, times in zip(self.naive.pools, self.forgotten_at, strict=True):
            times += [self.now_ns] * (len(pool.forgotten) - len(times))

    def lookup(self, pair: Pair) -> tuple[KVCacheBlocks, int]:
        self.note_times()
        expected = self.expected(pair.name, pair.naive)
        answer = self.plain_lookup(pair)
        assert self.reasons.last == expected
        self.met |= expected.num_missed_tokens.keys()
        return answer

    def expected(self, name: str, mine: NaiveRequest) -> LookupReport:
        num_tokens = len(mine.tokens)
        names_input = mine.salt is not None or len(self.cacheable) == len(self.naive.groups)
        if not (self.naive.caching and self.cacheable and names_input):
            return LookupReport(name, num_tokens, 0, {R.LOOKUP_OFF: num_tokens})
        _, hit = self.naive.find_hit(mine)
        if any(group.mamba == "none" for group in self.naive.groups):
            return LookupReport(
                name, num_tokens, 0, {R.BELOW_GRANULARITY: num_tokens}, dict.fromkeys(self.cacheable, 0)
            )
        first = tuple(mine.tokens[: self.both.setup.hash_block_size])
        has_origins = len(first) == self.both.setup.hash_block_size
        reads_encoder = len(self.cacheable) < len(self.naive.groups)
        origins = self.origins.get(first, []) if has_origins and not reads_encoder else []
        lengths, bounds = self.lengths(num_tokens)
        alike = mine.num_prompt + self.naive.shared_answer + (len(self.naive.groups) > 1) - self.num_dropped
        lengths = [length for length in lengths if length <= alike]
        bounds = [max(lengths, default=0), *bounds]
        lacks = {
            (i, length): [self.block(mine, i, end, origins) for end in self.needed(i, length)]
            for i in self.cacheable
            for length in lengths
        }

        def longest(level: int, groups: list[int] = self.cacheable) -> int:
            found = [n for n in lengths if all(block[0] <= level for i in groups for block in lacks[i, n])]
            return max(found, default=0)

        computed = {length: self.computed(mine, length, origins) for length in lengths}

        def longest_computed(level: int) -> int:
            return max([length for length in lengths if computed[length] <= level] + [longest(level)])

        assert longest(CACHED) == hit
        ends = [longest(level) for level in (FRESH, CHECKPOINT_EVICTED, EVICTED, INVALIDATED)]
        ends += [longest_computed(INVALIDATED), longest_computed(ELSEWHERE), *bounds, num_tokens]
        missed = {}
        for reason, start, end in zip(R, [hit, *ends], ends, strict=False):
            if end > start:
                missed[reason] = end - start
        evicted = None
        if (had := longest(INVALIDATED)) > longest(FRESH):
            gone = [block[1] for i in self.cacheable for block in lacks[i, had] if block[1] is not None]
            evicted = max(gone, key=lambda block: (block.seconds_since, block.num_evicted_since))
        short = {}
        if (kept := longest(EVICTED)) > longest(FRESH):
            for i in self.cacheable:
                for _, one in lacks[i, kept]:
                    if one is not None:
                        pool_id = self.naive.groups[i].pool
                        short[pool_id] = max(short.get(pool_id, 0), one.num_evicted_since + 1)
        if has_origins and mine.inserts:
            known = self.origins.setdefault(first, [])
            known[:] = [*(one for one in known if one != (mine.salt, mine.origin)), (mine.salt, mine.origin)]
            del known[:-MAX_ORIGINS]
        groups = {i: longest(CACHED, [i]) for i in self.cacheable}
        return LookupReport(name, num_tokens, hit, missed, groups, evicted, short)

    def lengths(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Lengths that a hit can have; the longest, and the longest without EAGLE, and with the last token."""
        bounds = []
        longest = min(num_tokens - (len(self.naive.groups) == 1) - self.num_dropped, num_tokens - 1)
        for limit in (longest, num_tokens - 1, num_tokens):
            bounds.append(max(range(0, max(limit, 0) + 1, self.alignment)))
        return list(range(self.alignment, bounds[0] + 1, self.alignment)), bounds

    @property
    def num_dropped(self) -> int:
        """Tokens at the end of a hit, by EAGLE."""
        groups = [self.naive.groups[i] for i in self.cacheable]
        return max([group.block_size for group in groups if self.naive._drops(group)], default=0)

    def needed(self, i: int, length: int) -> list[int]:
        """Where the blocks end that a hit of the group needs."""
        group = self.naive.groups[i]
        columns = [*self.naive.needed_for_hit(group, length)]
        if self.naive._drops(group) and group.mamba is None:
            columns.append(length // group.block_size)
        return [(column + 1) * group.block_size for column in columns]

    def computed(self, mine: NaiveRequest, length: int, origins: list[tuple]) -> int:
        """The level of the tokens that a hit has, and of those behind it that EAGLE asks for.

        By the groups that keep every token; where there is none, whoever came by.
        """
        groups = self.naive.groups
        drops = [groups[i].block_size for i in self.cacheable if self.naive._drops(groups[i]) and not groups[i].mamba]
        end = length + max(drops, default=0)
        whole = [i for i in self.cacheable if not groups[i].is_local]
        if whole:
            ends = [(i, stop) for i in whole for stop in range(groups[i].block_size, end + 1, groups[i].block_size)]
            level = max(self.block(mine, i, stop, origins)[0] for i, stop in ends)
            if self.max_evicted > 1_000:  # all is remembered
                came_by = all(mine.key(stop) in self.naive.computed[i] for i, stop in ends)
                assert came_by == (level <= INVALIDATED)
            return level
        first = next(i for i in self.naive.order if i in self.cacheable)
        known = list(dict.fromkeys(reversed(self.naive.computed[first])))[: self.max_evicted]
        tokens = tuple(mine.tokens[: end // groups[first].block_size * groups[first].block_size])
        if (mine.salt, mine.origin, tokens) in known:
            return CACHED
        return ELSEWHERE if any((*other, tokens) in known for other in origins) else UNKNOWN

    def block(self, mine: NaiveRequest, i: int, end: int, origins: list[tuple]) -> tuple[int, EvictedBlock | None]:
        pool_id = self.naive.groups[i].pool
        pool = self.naive.pools[pool_id]
        if blocks := pool.holders.get((i, mine.key(end))):
            return (FRESH if blocks[0] in self.naive.fresh[pool_id] else CACHED), None
        for since, (name, was_reused) in enumerate(reversed(pool.forgotten[-self.max_evicted :])):
            if name == (i, mine.key(end)):
                seconds = (self.now_ns - self.forgotten_at[pool_id][len(pool.forgotten) - 1 - since]) / 1e9
                reused = CHECKPOINT_EVICTED if self.naive.groups[i].is_local else EVICTED
                return (reused if was_reused else INVALIDATED), EvictedBlock(was_reused, since, seconds)
        others = [one for one in origins if one != (mine.salt, mine.origin)]
        if any((i, (*other, tuple(mine.tokens[:end]))) in pool.holders for other in others):
            return ELSEWHERE, None
        return UNKNOWN, None


@pytest.mark.parametrize("name", SETUPS)
def test_every_report_is_what_a_search_by_brute_force_says(name: str) -> None:
    for seed, max_evicted in enumerate((100_000, 4)):
        calls = RandomMisses(SETUPS[name], [seed, *name.encode()], max_evicted)
        for _ in range(100):
            calls.call()
        reports = list(calls.reasons.reports)
        for report in reports:
            assert report.num_hit_tokens + sum(report.num_missed_tokens.values()) == report.num_tokens
        assert calls.reasons.num_admitted == len(reports) <= calls.reasons.num_lookups
        assert calls.reasons.num_hit_tokens == sum(report.num_hit_tokens for report in reports)
        totals = {reason: sum(report.num_missed_tokens.get(reason, 0) for report in reports) for reason in R}
        assert dict(calls.reasons.num_missed_tokens) == {reason: total for reason, total in totals.items() if total}


def test_random_calls_meet_every_reason() -> None:
    met: set[MissReason] = set()
    for name in ("hybrid_next_step_hits", "full_eagle", "full_cross", "hybrid_retained", "rswa"):
        calls = RandomMisses(SETUPS[name], 2, 1_000)
        for _ in range(300):
            calls.call()
        met |= calls.met
    assert met == set(R)


# -- one at a time ----------------------------------------------------------------------------------------------------


def manager_of(
    setup: Setup, num_blocks: int, sub_block_hits: bool = False, **options: Any
) -> tuple[KVCacheManager, MissReasons]:
    reasons = MissReasons(**options)
    manager = setup.manager([num_blocks], miss_reasons=reasons, track_origins=True, sub_block_hits=sub_block_hits)
    return manager, reasons


def look_up(manager: KVCacheManager, **options: Any) -> LookupReport:
    manager.get_computed_blocks(request("probe", **options))
    assert manager.miss_reasons is not None
    assert manager.miss_reasons.last is not None
    return manager.miss_reasons.last


def missed(manager: KVCacheManager, **options: Any) -> dict[MissReason, int]:
    return dict(look_up(manager, **options).num_missed_tokens)


def test_reasons_one_by_one() -> None:
    """Prompts of 9 tokens in blocks of 2: the last token is never a hit."""
    now = [0]
    manager, reasons = manager_of(FULL, 6, clock=lambda: now[0])
    rest = {R.BELOW_GRANULARITY: 1}
    assert missed(manager, num_tokens=1) == {R.BELOW_GRANULARITY: 1}
    assert missed(manager, num_tokens=2) == {R.LAST_TOKEN: 2}
    assert missed(manager, cache_salt="a") == {R.NEVER_SEEN: 8} | rest
    first = request("first", cache_salt="a")
    compute(manager, first)
    assert missed(manager, cache_salt="a") == rest
    assert missed(manager, cache_salt="a", num_tokens=8) == {R.LAST_TOKEN: 2}
    assert missed(manager, cache_salt="b") == {R.OTHER_SALT: 8} | rest
    manager.free(first)
    other = request("other", num_tokens=4, cache_salt="c")
    now[0] = 5_000_000_000
    compute(manager, other)  # takes the blank block and that of the first's tokens 6 and 7
    now[0] = 7_000_000_000
    report = look_up(manager, cache_salt="a", num_tokens=13)
    assert report.num_missed_tokens == {R.EVICTED: 2, R.NEVER_SEEN: 4} | rest
    assert report.reason is R.EVICTED
    assert report.evicted == EvictedBlock(was_reused=True, num_evicted_since=0, seconds_since=2.0)
    manager.invalidate(cache_salt="a")
    assert missed(manager, cache_salt="a") == {R.INVALIDATED: 8} | rest
    manager.free(other)
    manager.reset_prefix_cache()
    assert missed(manager, cache_salt="c", num_tokens=5) == {R.INVALIDATED: 4} | rest
    assert missed(manager, skip_reading_prefix_cache=True) == {R.LOOKUP_OFF: 9}
    assert (reasons.num_lookups, reasons.num_admitted) == (12, 2)


@pytest.mark.parametrize("seed", range(10))
def test_so_many_blocks_more_would_have_kept_what_was_evicted(seed: int) -> None:
    """Where the block goes first that was not used for the longest time, unhashed ones before all."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 2, 40).tolist()
    prompts = [trunk[: rng.integers(0, 30)] + rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(40)]

    def reports(num_blocks: int) -> list[LookupReport]:
        reasons = MissReasons()
        setup = replace(FULL, uncached_first=True, max_model_len=40)
        manager = setup.manager([num_blocks], miss_reasons=reasons)
        for number, tokens in enumerate(prompts):
            new = Request(str(number), tokens, block_hasher=HASHER)
            compute(manager, new)
            manager.free(new)
        return list(reasons.reports)

    short = [(place, report) for place, report in enumerate(reports(24)) if report.num_blocks_short]
    assert short
    for place, report in short:
        kept = reports(24 + report.num_blocks_short[0])[place]
        assert kept.num_hit_tokens >= report.num_hit_tokens + report.num_missed_tokens[R.EVICTED]


@pytest.mark.parametrize(("setup", "reason"), [(HYBRID, R.EVICTED), (WINDOW, R.CHECKPOINT_EVICTED)])
def test_checkpoints_are_evicted_or_never_made(setup: Setup, reason: MissReason) -> None:
    """A prompt of 13 tokens leaves a checkpoint at 12, and none before; of the hybrid the tokens are evicted too."""
    manager, _ = manager_of(replace(setup, retention=0), 1 + 7 * len(setup.groups))
    owner, rest = request("owner", num_tokens=13), {R.BELOW_GRANULARITY: 1}
    compute(manager, owner)
    assert missed(manager, num_tokens=9) == {R.NO_CHECKPOINT: 8} | rest
    assert missed(manager, num_tokens=15) == {R.NEVER_SEEN: 2} | rest
    manager.free(owner)
    compute(manager, Request("taker", [99] * 14, block_hasher=HASHER))
    assert missed(manager, num_tokens=15) == {reason: 12, R.NEVER_SEEN: 2} | rest


def test_every_reason_has_a_remedy() -> None:
    assert all(reason.remedy for reason in R)


def test_the_groups_that_limit_are_named() -> None:
    manager, reasons = manager_of(HYBRID, 40)
    compute(manager, request("owner"))
    manager.evict_blocks(manager.get_block_ids("owner")[2][-2:-1])
    report = look_up(manager)
    assert report.group_hit_tokens == {0: 8, 1: 8, 2: 6}
    assert (report.num_hit_tokens, report.limited_by) == (6, (2,))
    compute(manager, request("probe"))
    assert reasons.num_tokens_short == {2: 2}
    assert look_up(manager, cache_salt="other").limited_by == ()
    assert reasons.num_tokens_short == {2: 2}


def test_a_block_that_its_last_holder_writes_to_is_evicted() -> None:
    """The child of a fork goes on from inside a block that the parent filled and registered, and outlives it."""
    manager, _ = manager_of(FULL, 40)
    parent = request("parent", num_tokens=8)
    compute(manager, parent)
    (child,) = manager.fork(parent, 1, num_in_flight_tokens=1) or ()
    manager.free(parent)
    assert missed(manager) == {R.BELOW_GRANULARITY: 1}
    assert manager.allocate_slots(child, 1, delay_cache_blocks=True) is not None
    assert missed(manager) == {R.EVICTED: 2, R.BELOW_GRANULARITY: 1}


def test_a_request_without_hashes_was_never_seen() -> None:
    manager, _ = manager_of(FULL, 40)
    unhashed = request("unhashed")
    unhashed.block_hasher = None
    unhashed.block_hashes.clear()
    manager.get_computed_blocks(unhashed)
    assert manager.miss_reasons is not None
    assert manager.miss_reasons.last is not None
    assert manager.miss_reasons.last.num_missed_tokens == {R.NEVER_SEEN: 8, R.BELOW_GRANULARITY: 1}


def test_recorded_calls_replay_with_and_without(tmp_path: Any) -> None:
    path = tmp_path / "calls"
    manager, reasons = manager_of(FULL, 6)
    with CallRecorder(manager, path) as recorder:
        compute(recorder.manager, request("owner"))
        missed(recorder.manager, cache_salt="b")
    assert replay_calls(path).manager.miss_reasons is None
    assert reasons.num_lookups == 2


def test_a_request_that_waits_is_counted_when_it_is_admitted() -> None:
    """Once, with what its last lookup found; one that is given up is not counted."""
    manager, reasons = manager_of(FULL, 40)
    for _ in range(3):
        look_up(manager, cache_salt="a")
    look_up_other = manager.get_computed_blocks(request("given up", num_tokens=4))
    assert look_up_other[1] == 0
    assert (reasons.num_lookups, reasons.num_admitted, reasons.num_missed_tokens) == (4, 0, {})
    compute(manager, request("probe", cache_salt="a"))
    assert reasons.num_missed_tokens == {R.NEVER_SEEN: 8, R.BELOW_GRANULARITY: 1}
    assert (reasons.num_lookups, reasons.num_admitted) == (5, 1)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_the_latest_reports_are_kept() -> None:
    manager, reasons = manager_of(FULL, 40, max_reports=3)
    for i in range(5):
        compute(manager, request(f"r{i}", cache_salt=f"s{i}"))
    assert [report.request_id for report in reasons.reports] == ["r2", "r3", "r4"]
    assert reasons.num_admitted == 5
    assert reasons.num_missed_tokens == {R.NEVER_SEEN: 8, R.OTHER_SALT: 32, R.BELOW_GRANULARITY: 5}


@pytest.mark.parametrize("name", ["max_evicted_blocks", "max_prefixes", "max_reports"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        MissReasons(**{name: 0})


def test_reasons_of_another_manager_are_refused() -> None:
    _, reasons = manager_of(FULL, 40)
    with pytest.raises(ValueError, match="expected a MissReasons of its own for each manager"):
        FULL.manager([40], miss_reasons=reasons)
