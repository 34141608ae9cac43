"""The manager's calls one by one: what they answer, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from kvjax.core import (
    BlockHasher,
    BlockRemoved,
    BlockStored,
    KVCacheBlocks,
    KVCacheManager,
    PrefixCacheStats,
    ReleaseRules,
    Request,
)
from kvjax.errors import BlockStateError, UnknownRequestError
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

BLOCK_SIZE = 4
FULL = NaiveGroup(BLOCK_SIZE)
WINDOW = NaiveGroup(BLOCK_SIZE, window=6)
HASHER = BlockHasher(BLOCK_SIZE, seed="test")


def make_manager(num_blocks: int = 20, *groups: NaiveGroup, max_model_len: int = 40, **options: Any) -> KVCacheManager:
    config = config_of(list(groups or (FULL,)), [num_blocks])
    return KVCacheManager(config, max_model_len, BLOCK_SIZE, **options)


def make_request(name: str = "r", num_tokens: int = 10, **options: Any) -> Request:
    return Request(name, range(num_tokens), **{"block_hasher": HASHER, **options})


def run_prompt(manager: KVCacheManager, name: str = "r", num_tokens: int = 10, **options: Any) -> Request:
    """A request whose prompt is computed, hits included."""
    request = make_request(name, num_tokens, **options)
    hit, length = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, num_tokens - length, length, hit) is not None
    request.num_computed_tokens = num_tokens
    return request


def unchanged(manager: KVCacheManager, call: Callable[[], object], error: type[Exception], message: str) -> None:
    before = manager.snapshot()
    with pytest.raises(error, match=message):
        call()
    assert manager.snapshot() == before


# -- hits


@pytest.mark.parametrize(
    "options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}, {"block_hasher": None}]
)
def test_requests_that_may_not_or_can_not_look_up(options: dict[str, Any]) -> None:
    manager = make_manager()
    run_prompt(manager, "a")
    blocks, length = manager.get_computed_blocks(make_request("b", **options))
    assert blocks is manager.empty_kv_cache_blocks
    assert length == 0


def test_a_coarse_block_is_found_by_all_its_hashes_or_by_the_last() -> None:
    for mode in ("concat", "last"):
        manager = make_manager(20, NaiveGroup(8), rules=ReleaseRules(coarse_hash_mode=mode))
        run_prompt(manager, "a", 17)
        assert manager.get_computed_blocks(make_request("b", 17))[1] == 16
        first, second = make_request(num_tokens=8).block_hashes
        assert manager.block_pool.block_hash_of(1) == (first + second if mode == "concat" else second)


# -- slots


def test_references_outside_tables_make_no_common_prefix() -> None:
    """A pin beside one of two requests is no second request; and takes none away from both."""
    manager = make_manager(30, FULL)
    first = run_prompt(manager, "a", 12)
    assert manager.pin(first, longest_request=8) is not None
    other = run_prompt(manager, "b", 12, cache_salt="other")
    assert manager.get_num_common_prefix_blocks("a") == [0]
    manager.free(other)
    assert manager.get_num_common_prefix_blocks("a") == [3]
    assert manager.fork(first, 2) is not None
    assert manager.get_num_common_prefix_blocks("a.2") == [3]


# -- the cache as a whole


def test_events_tell_of_every_group() -> None:
    manager = make_manager(20, FULL, WINDOW, enable_kv_cache_events=True)
    request = run_prompt(manager, "a", 8)
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [(event.group_idx, event.kind, event.sliding_window) for event in stored] == [
        (0, "full_attention", None),
        (1, "sliding_window", 6),
    ]
    assert {event.block_hashes for event in stored} == {tuple(request.block_hashes)}
    assert manager.take_events() == []
    manager.evict_blocks([1])
    assert manager.take_events() == [BlockRemoved((request.block_hashes[0],), group_idx=0)]


def test_stats_count_preempted_requests_apart() -> None:
    manager = make_manager(log_stats=True)
    request = run_prompt(manager, "a", 10)
    run_prompt(manager, "b", 9)
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    hit, length = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 10 - length, length, hit) is not None
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(
        requests=2, queries=19, hits=8, preempted_requests=1, preempted_queries=10, preempted_hits=8
    )
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    assert make_manager().make_prefix_cache_stats() is None


def test_stats_count_a_request_once_when_it_is_admitted() -> None:
    """However often it is looked up while it waits, refused or not; one that is given up counts nothing."""
    manager = make_manager(5, log_stats=True)
    request, other = run_prompt(manager, "a", 10), make_request("b", 11)
    manager.make_prefix_cache_stats()
    for _ in range(3):
        hit, length = manager.get_computed_blocks(other)
        assert manager.allocate_slots(other, 11 - length, length, hit, num_lookahead_tokens=12) is None
    manager.get_computed_blocks(make_request("given up", 7))
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    manager.free(request)
    hit, length = manager.get_computed_blocks(other)
    assert manager.allocate_slots(other, 11 - length, length, hit) is not None
    other.num_computed_tokens = 11
    assert manager.allocate_slots(other, 1) is not None
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=11, hits=8)
    unread = make_request("unread", 3, skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(unread)[1] == 0
    assert manager.allocate_slots(unread, 3) is not None
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()


def test_usage_is_that_of_the_fullest_pool() -> None:
    config = config_of([FULL, NaiveGroup(BLOCK_SIZE, pool=1)], [11, 5])
    manager = KVCacheManager(config, 40, BLOCK_SIZE)
    assert manager.usage == 0.0
    run_prompt(manager, "a", 8)
    assert manager.usage == 0.5
    assert manager.block_pool is manager.block_pools[0]


def test_describe_names_groups_pools_and_requests() -> None:
    manager = make_manager(20, FULL, WINDOW)
    run_prompt(manager)
    text = manager.describe()
    assert "2 groups, 1 running requests" in text
    assert "groups (1,): sliding_window, blocks of 4 tokens in pool 0, 3 in tables" in text
    assert "pool of 20 blocks" in text


def test_a_seedless_cbor_hash_that_is_published_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    manager = make_manager(enable_kv_cache_events=True)
    with pytest.warns(UserWarning, match="KV events publish sha256_cbor hashes that no other process can compute"):
        manager.get_computed_blocks(make_request("a", block_hasher=BlockHasher(BLOCK_SIZE)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.get_computed_blocks(make_request("b", block_hasher=BlockHasher(BLOCK_SIZE)))
        seeded, pickled = BlockHasher(BLOCK_SIZE, seed="s"), BlockHasher(BLOCK_SIZE, "sha256")
        for hasher in (seeded, pickled):
            make_manager(enable_kv_cache_events=True).get_computed_blocks(make_request("c", block_hasher=hasher))
        make_manager().get_computed_blocks(make_request("d", block_hasher=BlockHasher(BLOCK_SIZE)))


def test_requests_with_a_seedless_hasher_each_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    manager = make_manager()
    run_prompt(manager, "a", block_hasher=BlockHasher(BLOCK_SIZE))
    assert manager.get_computed_blocks(make_request("b", block_hasher=BlockHasher(BLOCK_SIZE)))[1] == 8


@pytest.mark.parametrize("other", [BlockHasher(BLOCK_SIZE, seed="t"), BlockHasher(BLOCK_SIZE, "xxhash", seed="s")])
def test_hashers_that_share_nothing_are_warned_of_once(other: BlockHasher) -> None:
    manager = make_manager()
    one = BlockHasher(BLOCK_SIZE, seed="s")
    manager.get_computed_blocks(make_request("a", block_hasher=one))
    manager.get_computed_blocks(make_request("b", block_hasher=None))
    manager.get_computed_blocks(make_request("c", block_hasher=BlockHasher(BLOCK_SIZE, seed="s")))
    with pytest.warns(UserWarning, match=r"request 'd': .* got another .*; the two share no blocks"):
        manager.get_computed_blocks(make_request("d", block_hasher=other))
    for hasher in (one, other):
        manager.get_computed_blocks(make_request("e", block_hasher=hasher))


def test_blocks_can_be_made_from_ids_and_views() -> None:
    manager = make_manager()
    views = [manager.block_pool.blocks[2], manager.block_pool.blocks[5]]
    assert manager.create_kv_cache_blocks([views]) == manager.create_kv_cache_blocks(([2, 5],))
    assert manager.create_kv_cache_blocks([[]]) is manager.empty_kv_cache_blocks


# -- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 0}, ValueError, "expected max_model_len >= 1, got 0"),
        ({"dcp_world_size": 0}, ValueError, "expected dcp_world_size >= 1, got 0"),
        ({"pcp_world_size": -1}, ValueError, "expected pcp_world_size >= 1, got -1"),
        ({"max_in_flight_tokens": 0}, ValueError, "expected max_in_flight_tokens >= 1, got 0"),
        ({"max_num_reqs": 0}, ValueError, "expected max_num_reqs >= 1, got 0"),
        (
            {"rules": ReleaseRules(free_order="lifo")},
            ValueError,
            "expected free_order of append, .*, got 'lifo'",
        ),
        (
            {"rules": ReleaseRules(coarse_hash_mode="first")},
            ValueError,
            "coarse_hash_mode concat or last, got 'first'",
        ),
        ({"enable_cachng": True}, TypeError, "expected an option of enable_caching, .*, got 'enable_cachng'"),
        ({"num_blocks": 1}, ValueError, r"expected num_blocks >= 2 \(block 0 is the null block\), got 1"),
    ],
)
def test_a_manager_that_can_not_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_manager(**options)


def test_hash_blocks_must_divide_every_block() -> None:
    config = config_of([FULL, NaiveGroup(6)], [9])
    with pytest.raises(ValueError, match="hash_block_size 4 and full_attention blocks of 6 tokens"):
        KVCacheManager(config, 40, 4)
    with pytest.raises(ValueError, match="expected hash_block_size >= 1, got 0"):
        KVCacheManager(config, 40, 0)
    KVCacheManager(config, 40, 4, enable_caching=False)
    KVCacheManager(config, 40, 2)


def test_windows_do_not_work_with_context_parallelism() -> None:
    with pytest.raises(NotImplementedError, match="sliding_window attention does not work with context parallelism"):
        make_manager(20, FULL, WINDOW, dcp_world_size=2)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_new_tokens": -1}, "expected num_new_tokens >= 0, got -1"),
        ({"num_new_tokens": 0}, "expected num_new_tokens >= 1, got 0; only a hit or a load of tokens computes nothing"),
        ({"num_new_computed_tokens": -4}, "expected num_new_computed_tokens >= 0, got -4"),
        ({"num_lookahead_tokens": -1}, "expected num_lookahead_tokens >= 0, got -1"),
        ({"num_external_computed_tokens": -1}, "expected num_external_computed_tokens >= 0, got -1"),
        ({"num_encoder_tokens": -1}, "expected num_encoder_tokens >= 0, got -1"),
        ({"num_in_flight_tokens": -1}, "expected num_in_flight_tokens >= 0, got -1"),
        ({"num_new_tokens": 41}, "request 'b': expected at most max_model_len = 40 tokens, got 41"),
        ({"num_external_computed_tokens": 40}, "request 'b': expected at most max_model_len = 40 tokens, got 41"),
        (
            {"num_new_computed_tokens": 4},
            "group 0: expected 4 computed tokens, a multiple of 4, in blocks of 4, got 0 ",
        ),
    ],
)
def test_counts_that_can_not_be(counts: dict[str, int], message: str) -> None:
    manager = make_manager()
    run_prompt(manager, "a")
    request = make_request("b", cache_salt="b")
    arguments = {"num_new_tokens": 1, **counts}
    unchanged(manager, lambda: manager.allocate_slots(request, **arguments), ValueError, message)
    assert request.row == -1


def test_a_running_request_can_not_grow_past_the_longest() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a")
    message = "request 'a': expected at most max_model_len = 40 tokens, got 41"
    unchanged(manager, lambda: manager.allocate_slots(request, 31), ValueError, message)
    must_fit = {"full_sequence_must_fit": True}
    unchanged(manager, lambda: manager.allocate_slots(request, 31, **must_fit), ValueError, message)


@pytest.mark.parametrize("max_model_len", [9, 10, 11, 12])
def test_the_longest_request_need_not_fill_its_last_block(max_model_len: int) -> None:
    manager = make_manager(max_model_len=max_model_len)
    request = run_prompt(manager, "a", max_model_len)
    message = f"expected at most max_model_len = {max_model_len} tokens, got {max_model_len + 1}"
    unchanged(manager, lambda: manager.allocate_slots(request, 1), ValueError, message)
    unchanged(manager, lambda: manager.plan_step([request.row], 1), ValueError, message)


def test_a_prompt_longer_than_the_longest_request() -> None:
    message = "request 'long': expected at most max_model_len = 40 tokens, got 41"
    for num_blocks in (20, 2):  # also where its first blocks would not fit
        manager = make_manager(num_blocks)
        unchanged(manager, lambda m=manager: m.allocate_slots(make_request("long", 41), 9), ValueError, message)


def test_only_a_new_request_comes_with_a_hit() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a", 12)
    hit, length = manager.get_computed_blocks(make_request("b", 12))
    message = "request 'a' is running; only a new request comes with a hit"
    for arguments in ((1, length, hit), (1, 4), (1, 0, None, 0, 4), (1, 0, hit)):
        unchanged(manager, lambda a=arguments: manager.allocate_slots(request, *a), ValueError, message)


def test_ids_are_unique_and_requests_belong_to_one_manager() -> None:
    manager, other = make_manager(), make_manager()
    run_prompt(manager, "a")
    theirs = run_prompt(other, "b")
    unchanged(
        manager, lambda: manager.allocate_slots(make_request("a"), 1), ValueError, "'a' is running; ids are unique"
    )
    unchanged(manager, lambda: manager.allocate_slots(theirs, 1), ValueError, "'b' runs in another manager")


def test_computed_tokens_need_blocks() -> None:
    manager, request = make_manager(), make_request()
    request.num_computed_tokens = 4
    message = "request 'r' has 4 computed tokens but no blocks here; expected 0"
    unchanged(manager, lambda: manager.allocate_slots(request, 1), ValueError, message)


def test_a_hit_must_be_whole_and_of_this_manager() -> None:
    manager, other = make_manager(20, FULL, WINDOW), make_manager(20, FULL, WINDOW)
    for each in (manager, other):
        run_prompt(each, "a", 17)
    request = make_request("b", 17)
    hit, length = manager.get_computed_blocks(request)
    theirs, _ = other.get_computed_blocks(request)

    def allocate(blocks: KVCacheBlocks, num_tokens: int = length) -> object:
        return manager.allocate_slots(request, 1, num_tokens, blocks)

    unchanged(manager, lambda: allocate(theirs), ValueError, "expected new_computed_blocks of this manager")
    unchanged(
        manager,
        lambda: allocate(hit, 12),
        ValueError,
        "group 0: expected 12 computed tokens, a multiple of 4, in blocks of 4, got 4",
    )
    holes = manager.create_kv_cache_blocks([hit.block_ids[0], [0, 0, 0, hit.block_ids[1][3]]])
    unchanged(manager, lambda: allocate(holes), ValueError, r"group 1: expected ids in \(0, 20\) inside the window")
    beyond = manager.create_kv_cache_blocks([[1, 2, 3, 20], hit.block_ids[1]])
    unchanged(manager, lambda: allocate(beyond), ValueError, r"group 0: expected ids in \(0, 20\) inside the window")
    manager.evict_blocks([3])
    unchanged(manager, lambda: allocate(hit), BlockStateError, "group 0: block 3 of the hit is no longer cached")


def test_a_request_hashed_in_other_blocks() -> None:
    manager, request = make_manager(), make_request("a", block_hasher=BlockHasher(8, seed="test"))
    message = "request 'a': expected a block_hasher of hash_block_size = 4 tokens, got 8"
    unchanged(manager, lambda: manager.get_computed_blocks(request), ValueError, message)
    unchanged(manager, lambda: manager.allocate_slots(request, 4), ValueError, message)


def test_freeing_twice() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a")
    manager.free(request)
    unchanged(manager, lambda: manager.free(request), UnknownRequestError, "expected a request that runs here, got 'a'")


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.get_blocks("x"),
        lambda m: m.get_block_ids("x"),
        lambda m: m.get_num_common_prefix_blocks("x"),
        lambda m: m.remove_skipped_blocks("x", 4),
        lambda m: m.free(make_request("x")),
        lambda m: m.cache_blocks(make_request("x"), 4),
    ],
)
def test_unknown_requests(call: Callable[[KVCacheManager], object]) -> None:
    manager = make_manager()
    run_prompt(manager, "a")
    unchanged(manager, lambda: call(manager), UnknownRequestError, "'x'")


def test_other_refusals() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a")
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: manager.cache_blocks(request, 13), r"expected num_computed_tokens in \[0, 12\], got 13"),
        (lambda: manager.cache_blocks(request, -1), "expected num_computed_tokens >= 0, got -1"),
        (lambda: manager.remove_skipped_blocks("a", -1), "expected num_computed_tokens >= 0, got -1"),
        (lambda: manager.evict_blocks([20]), r"expected block ids in \[0, 20\), got 20"),
        (lambda: manager.evict_blocks([1], pool_id=1), r"expected pool_id in \[0, 1\), got 1"),
        (lambda: manager.create_kv_cache_blocks([[1], [2]]), "expected blocks of 1 groups, got 2"),
    ]
    for call, message in refusals:
        unchanged(manager, call, ValueError, message)


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW, WINDOW)], ids=["full", "window", "hybrid"])
def test_running_out_changes_nothing_at_any_pool_size(groups: tuple[NaiveGroup, ...]) -> None:
    """Three requests of 14 tokens in chunks of 5; from 2 blocks to the number with which nothing is refused."""
    num_refused = 1
    num_blocks = 2
    while num_refused:
        manager = make_manager(num_blocks, *groups)
        num_refused = 0
        requests = [make_request(f"r{i}", 14, cache_salt=str(i)) for i in range(3)]
        for start in range(0, 14, 5):
            for request in requests:
                if request.num_computed_tokens != start:
                    continue
                count = min(5, 14 - start)
                before = manager.snapshot()
                if manager.allocate_slots(request, count) is not None:
                    request.num_computed_tokens += count
                    continue
                num_refused += 1
                after = manager.snapshot()
                if request.row < 0:
                    assert after == before
                assert after.requests == before.requests
                assert manager.allocate_slots(request, count) is None
                assert manager.snapshot() == after
        manager.check_invariants()
        num_blocks += 1
    assert num_blocks > 8
