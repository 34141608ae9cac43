"""The manager's calls one by one: what they answer, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    KVCacheBlocks,
    KVCacheManager,
    LoRARequest,
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


def test_a_second_request_shares_the_full_blocks_but_the_last_token() -> None:
    manager = make_manager()
    run_prompt(manager, "a", 12)
    hit, length = manager.get_computed_blocks(make_request("b", 12))
    assert (hit.get_block_ids(), length) == (([1, 2],), 8)  # the third block holds the token to compute
    assert manager.get_computed_blocks(make_request("c", 13))[1] == 12


def test_a_window_hits_with_nulls_before_what_it_sees() -> None:
    manager = make_manager(20, FULL, WINDOW)
    run_prompt(manager, "a", 17)
    hit, length = manager.get_computed_blocks(make_request("b", 17))
    assert (hit.get_block_ids(), length) == (([1, 2, 3, 4], [0, 0, 8, 9]), 16)


@pytest.mark.parametrize(
    "options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}, {"block_hasher": None}]
)
def test_requests_that_may_not_or_can_not_look_up(options: dict[str, Any]) -> None:
    manager = make_manager()
    run_prompt(manager, "a")
    blocks, length = manager.get_computed_blocks(make_request("b", **options))
    assert blocks is manager.empty_kv_cache_blocks
    assert length == 0


def test_salt_and_adapter_keep_requests_apart() -> None:
    manager = make_manager()
    run_prompt(manager, "a", cache_salt="x")
    run_prompt(manager, "b", lora=LoRARequest("x", "path"))
    assert manager.get_computed_blocks(make_request("c"))[1] == 0
    assert manager.get_computed_blocks(make_request("c", cache_salt="y"))[1] == 0
    assert manager.get_computed_blocks(make_request("c", cache_salt="x"))[1] == 8
    assert manager.get_computed_blocks(make_request("c", lora=LoRARequest("x", "path")))[1] == 8


def test_eagle_drops_the_last_block() -> None:
    manager = make_manager(use_eagle=True)
    run_prompt(manager, "a", 17)
    assert manager.get_computed_blocks(make_request("b", 17))[1] == 12
    assert manager.get_computed_blocks(make_request("b", 5))[1] == 0


def test_without_same_step_hits_a_block_waits_for_the_next_step() -> None:
    manager = make_manager(same_step_hits=False)
    run_prompt(manager, "a")
    assert manager.get_computed_blocks(make_request("b"))[1] == 0
    manager.new_step_starts()
    assert manager.get_computed_blocks(make_request("b"))[1] == 8


def test_a_preempted_request_finds_prompt_and_output_again() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a", 7)
    request.append_output_token_ids([7, 8])
    assert manager.allocate_slots(request, 2) is not None
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert manager.get_computed_blocks(request)[1] == 8


def test_context_parallelism_widens_the_blocks_of_full_attention() -> None:
    manager = make_manager(dcp_world_size=2, pcp_world_size=2, max_model_len=64)
    request = run_prompt(manager, "a", 33)
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert manager.get_computed_blocks(make_request("b", 33))[1] == 32
    manager.free(request)


def test_a_coarse_block_is_found_by_all_its_hashes_or_by_the_last() -> None:
    for mode in ("concat", "last"):
        manager = make_manager(20, NaiveGroup(8), rules=ReleaseRules(coarse_hash_mode=mode))
        run_prompt(manager, "a", 17)
        assert manager.get_computed_blocks(make_request("b", 17))[1] == 16
        first, second = make_request(num_tokens=8).block_hashes
        assert manager.block_pool.block_hash_of(1) == (first + second if mode == "concat" else second)


# -- slots


def test_a_running_request_gets_a_block_when_it_needs_one() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a", 7)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    request.num_computed_tokens = 8
    blocks = manager.allocate_slots(request, 1)
    assert blocks is not None
    assert blocks.get_block_ids() == ([3],)


def test_lookahead_slots_stop_at_the_longest_request() -> None:
    manager = make_manager(max_model_len=12)
    request = make_request("a", 11)
    blocks = manager.allocate_slots(request, 11, num_lookahead_tokens=9)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3],)


def test_tokens_that_the_request_does_not_have_are_not_registered() -> None:
    manager = make_manager()
    request = run_prompt(manager, "a", 7)
    manager.allocate_slots(request, 4)  # one known token would fill block 2, three are drafts
    assert manager.get_computed_blocks(make_request("b", 12))[1] == 4


def test_delayed_blocks_are_registered_by_hand() -> None:
    manager = make_manager()
    request = make_request("a", 12)
    manager.allocate_slots(request, 12, delay_cache_blocks=True)
    request.num_computed_tokens = 12
    assert manager.get_computed_blocks(make_request("b", 13))[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(make_request("b", 13))[1] == 8
    manager.cache_blocks(request, 12)
    assert manager.get_computed_blocks(make_request("b", 13))[1] == 12


def test_without_caching_nothing_is_registered() -> None:
    manager = make_manager(enable_caching=False)
    request = run_prompt(manager, "a", 12)
    manager.cache_blocks(request, 12)
    assert manager.get_computed_blocks(make_request("b", 12)) == (manager.empty_kv_cache_blocks, 0)
    assert manager.block_pool.num_hashed_blocks == 0


def test_hits_in_the_free_queue_count_as_needed() -> None:
    """Four free blocks, two of them the hit: touching them leaves two for the three that are missing."""
    manager = make_manager(5)
    manager.free(run_prompt(manager, "a", 9))
    hit, length = manager.get_computed_blocks(make_request("b", 20))
    assert (hit.get_block_ids(), length) == (([1, 2],), 8)
    before = manager.snapshot()
    assert manager.allocate_slots(make_request("b", 20), 12, length, hit) is None
    assert manager.snapshot() == before
    assert manager.allocate_slots(make_request("c", 16), 8, length, hit) is not None


def test_external_tokens_evict_no_hit_of_another_group() -> None:
    """All groups' hits are held before any group takes blocks for tokens from outside."""
    manager = make_manager(11, FULL, NaiveGroup(BLOCK_SIZE, window=20))
    first, second = run_prompt(manager, "a", 9), run_prompt(manager, "c", 8, cache_salt="other")
    manager.free(first)  # the hits 2, 1 and 5, 4 stand at the head of the queue, behind 3 and 6
    manager.free(second)
    request = make_request("b", 21)
    hit, length = manager.get_computed_blocks(request)
    assert (hit.get_block_ids(), length) == (([1, 2], [4, 5]), 8)
    blocks = manager.allocate_slots(request, 0, length, hit, num_external_computed_tokens=12, delay_cache_blocks=True)
    assert blocks is manager.empty_kv_cache_blocks  # blocks of external tokens are not among the new ones
    assert manager.get_block_ids("b") == ([1, 2, 3, 6, 8], [4, 5, 7, 10, 9])


def test_blocks_outside_the_window_go_back_even_if_the_call_is_refused() -> None:
    manager = make_manager(5, WINDOW)
    request = run_prompt(manager, "a", 16)
    request.append_output_token_ids(range(16, 40))
    assert manager.allocate_slots(request, 24) is None
    refused = manager.snapshot()
    assert refused.block_ids["a"] == ((0, 0, 3, 4),)
    assert manager.allocate_slots(request, 24) is None
    assert manager.snapshot() == refused


def test_a_window_that_has_left_all_blocks_behind() -> None:
    """As when more tokens are computed elsewhere than the request has blocks for."""
    manager = make_manager(20, WINDOW)
    request = run_prompt(manager, "a", 16)
    manager.remove_skipped_blocks("a", 39)
    assert manager.get_block_ids("a") == ([0, 0, 0, 0],)
    request.num_computed_tokens = 39
    assert manager.allocate_slots(request, 1) is not None
    assert manager.get_block_ids("a") == ([0, 0, 0, 0, 5, 6, 7, 8, 9, 10],)


def test_windows_keep_what_tokens_in_flight_may_give_back() -> None:
    manager = make_manager(20, WINDOW)
    request = run_prompt(manager, "a", 16)
    manager.allocate_slots(request, 1, num_in_flight_tokens=8)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
    manager.allocate_slots(request, 1, num_in_flight_tokens=4)
    assert manager.get_block_ids("a") == ([0, 2, 3, 4, 5],)


def test_a_whole_sequence_must_fit_on_demand() -> None:
    manager = make_manager(5)
    assert manager.allocate_slots(make_request("a", 17), 4, full_sequence_must_fit=True) is None
    request = make_request("a", 16)
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is not None
    request.num_computed_tokens = 4
    assert manager.allocate_slots(make_request("b", 4), 4) is not None
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 4) is not None


def test_what_left_the_windows_makes_room_for_a_whole_sequence() -> None:
    """16 tokens hold 4 blocks of each group; the window gives back 2, and the last token needs one of each."""
    manager = make_manager(9, FULL, WINDOW)
    request = make_request("a", 17)
    assert manager.allocate_slots(request, 16) is not None
    request.num_computed_tokens = 16
    assert manager.block_pool.num_free_blocks == 0
    assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is not None
    request.num_computed_tokens = 17
    request.append_output_token_ids(range(20))
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.get_block_ids("a")[1][:3] == [0, 0, 0]  # the refused call gave back what left the window since


def test_a_window_is_admitted_by_what_it_holds_at_once() -> None:
    """Window 6 and 4 tokens in flight: at most cdiv(5 + 4, 4) + 1 = 4 blocks, however long the prompt."""
    for in_flight, admitted in ((4, True), (8, False)):
        manager = make_manager(5, WINDOW, max_in_flight_tokens=in_flight)
        blocks = manager.allocate_slots(make_request("a", 40), 4, full_sequence_must_fit=True)
        assert (blocks is not None) == admitted


def test_a_table_grows_with_requests_and_tokens() -> None:
    manager = make_manager(400, max_model_len=300, max_num_reqs=1)
    for i in range(5):
        run_prompt(manager, f"r{i}", 20 + i, cache_salt=str(i))
    request = run_prompt(manager, "long", 290, cache_salt="long")
    assert manager.block_tables(0).shape[1] >= 73
    assert manager.num_blocks(0)[request.row] == 73
    assert manager.block_tables(0)[request.row, :73].tolist() == manager.get_block_ids("long")[0]


def test_freed_blocks_are_evicted_from_the_end_of_the_prompt() -> None:
    manager = make_manager(4)
    manager.free(run_prompt(manager, "a", 12))
    run_prompt(manager, "b", 3, cache_salt="other")
    assert manager.get_block_ids("b") == ([3],)
    assert manager.get_computed_blocks(make_request("c", 12))[1] == 8


def test_the_common_prefix_is_what_all_running_requests_hold() -> None:
    manager = make_manager(30, FULL, WINDOW)
    run_prompt(manager, "a", 12)
    assert manager.get_num_common_prefix_blocks("a") == [3, 0]
    run_prompt(manager, "b", 11)
    assert manager.get_num_common_prefix_blocks("a") == [2, 0]
    run_prompt(manager, "c", 5, cache_salt="other")
    assert manager.get_num_common_prefix_blocks("b") == [0, 0]


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


def test_eviction_by_id_forgets_hashes_only() -> None:
    manager = make_manager()
    run_prompt(manager, "a", 12)
    manager.evict_blocks({2})
    assert manager.get_computed_blocks(make_request("b", 13))[1] == 4
    assert manager.get_block_ids("a") == ([1, 2, 3],)


def test_a_reset_waits_until_every_block_is_free() -> None:
    manager = make_manager(log_stats=True, enable_kv_cache_events=True)
    request = run_prompt(manager)
    before = manager.snapshot()
    assert not manager.reset_prefix_cache()
    assert manager.snapshot() == before
    manager.free(request)
    manager.take_events()
    manager.make_prefix_cache_stats()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(reset=True)
    assert manager.get_computed_blocks(make_request())[1] == 0


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


def test_rows_are_shared_by_no_two_requests() -> None:
    manager = make_manager()
    first, second = run_prompt(manager, "a", 4), run_prompt(manager, "b", 4)
    step = manager.request_table.open_step(np.array([first.row]))
    row = first.row
    manager.free(first)
    third = run_prompt(manager, "c", 4)
    assert len({row, second.row, third.row}) == 3
    manager.request_table.close_step(step)
