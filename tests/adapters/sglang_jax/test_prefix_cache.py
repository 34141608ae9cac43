"""Requests through kvjax's cache and allocator with sglang-jax's surface, called as its scheduler calls its own.

The stack is not installed here: stand-ins have the recorded fields. `scripts/stack_references.py sglang_jax` plays the
same moves through the stack's own caches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvjax.adapters.sglang_jax import PrefixCache, SlotAllocator, WindowSlotAllocator
from kvjax.adapters.signatures import parameters_of, recorded
from kvjax.core import AllBlocksCleared, BlockHasher, BlockRemoved, BlockStored
from kvjax.errors import BlockStateError, MissingStackError, UnknownStackError
from scripts.stack_checks.served_requests import Key, Rows, ServedRequests, StateRows, play, random_moves
from scripts.stack_checks.trace_prompts import pool_sizes, serve_prompts
from tests.adapters.stand_ins import stack_with

WINDOW = 10


class KvjaxWindows(WindowSlotAllocator):  # type: ignore[misc]
    """What `install(policy="kvjax")` has the stack make."""

    eviction_policy = "probation"


class KvjaxCache(PrefixCache):  # type: ignore[misc]
    """What `install(policy="kvjax")` has the stack make."""

    eviction_policy = "probation"


CACHES = {"stack": (PrefixCache, WindowSlotAllocator), "kvjax": (KvjaxCache, KvjaxWindows)}


@pytest.fixture(autouse=True)
def classes() -> Iterator[dict[str, Any]]:
    """The recorded classes, and a key that has tokens."""
    with stack_with("sglang_jax") as made:
        yield {**made, "RadixKey": Key}


def served_by(
    classes: dict[str, Any],
    *,
    pages: int,
    page_size: int = 4,
    window_pages: int = 0,
    ranks: int = 1,
    policy: str = "stack",
    **options: Any,
) -> ServedRequests:
    """A cache of that many pages a rank, and of that many window pages if any."""
    cache_class, window_class = CACHES[policy]
    rows = Rows(6)
    size, size_swa = pages * page_size * ranks, window_pages * page_size * ranks
    if window_pages:
        windows = window_class(size, size_swa, page_size=page_size, dp_size=ranks)
        cache = cache_class(rows, windows, page_size, sliding_window_size=WINDOW, **options)
        return ServedRequests(cache, windows, rows, classes, WINDOW)
    allocator = SlotAllocator(size, page_size, dp_size=ranks)
    return ServedRequests(PrefixCache(rows, allocator, page_size, **options), allocator, rows, classes, None)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("pages", "page_size"), [(20, 4), (60, 4), (80, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_hits_hold_their_prefix_and_no_slot_is_given_twice(
    seed: int, pages: int, page_size: int, ranks: int, classes: dict[str, Any]
) -> None:
    """The laws are in `ServedRequests`; at the end every token's place is free."""
    served = served_by(classes, pages=pages, page_size=page_size, ranks=ranks)
    for move in random_moves(seed, 50, ranks):
        play(served, move)
        served.check_sizes(pages * page_size, 0, range(ranks))
        served.cache.sanity_check()
    assert sum(served.hits) > 0
    served.end_all()
    assert [served.allocator.available_size(rank) for rank in range(ranks)] == [pages * page_size] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("pages", "window_pages", "page_size"), [(20, 14, 4), (60, 24, 4), (90, 60, 1)])
@pytest.mark.parametrize("policy", CACHES)
@pytest.mark.parametrize("seed", range(2))
def test_hits_of_windows_hold_the_window_too(
    seed: int, policy: str, pages: int, window_pages: int, page_size: int, ranks: int, classes: dict[str, Any]
) -> None:
    served = served_by(classes, pages=pages, window_pages=window_pages, page_size=page_size, ranks=ranks, policy=policy)
    size, size_swa = pages * page_size, window_pages * page_size
    for move in random_moves(seed, 60, ranks):
        play(served, move)
        served.check_sizes(size, size_swa, range(ranks))
        served.cache.sanity_check()
    assert sum(served.hits) > 0
    served.end_all()
    served.cache.evict(classes["EvictParams"](num_tokens=0, swa_num_tokens=10**6, dp_rank=None))
    assert [served.allocator.full_available_size(rank) for rank in range(ranks)] == [size] * ranks
    assert [served.allocator.swa_available_size(rank) for rank in range(ranks)] == [size_swa] * ranks


def test_kvjax_s_policy_keeps_windows_where_prompts_end(classes: dict[str, Any]) -> None:
    """Four prompts in turns, in chunks: the pages of all tokens fit, and of the windows those of the prompts' ends."""
    hits = {}
    for policy in CACHES:
        served = served_by(classes, pages=70, window_pages=30, policy=policy)
        for turn in range(3):
            for n in range(4):
                assert served.start([10 * n + i % 7 for i in range(40)], None, None, 3), (turn, n)
                served.end(0)
                served.cache.sanity_check()
        hits[policy] = served.hits
    assert hits == {"stack": [0] * 12, "kvjax": [0] * 4 + [36] * 8}


def test_kvjax_s_policy_keeps_the_window_where_prompts_part(classes: dict[str, Any]) -> None:
    """A prompt a turn has the shared beginning, whose windows the others push out until a second one parts."""
    hits = {}
    for policy in CACHES:
        served = served_by(classes, pages=200, window_pages=26, policy=policy)
        for turn in range(4):
            for n, first in ((0, [1] * 24), (1, [2 + turn] * 24), (2, [12 + turn] * 24)):
                assert served.start([*first, *[30 + 3 * turn + n] * 20], None, None, 2)
                served.end(0)
        hits[policy] = served.hits[::3]
    assert hits == {"stack": [0, 0, 0, 0], "kvjax": [0, 0, 24, 24]}


def test_kvjax_s_policy_keeps_what_the_same_prompt_of_whole_pages_needs(classes: dict[str, Any]) -> None:
    """Its hit ends a page before its end, since its last token is computed."""
    served = served_by(classes, pages=100, window_pages=20, policy="kvjax")
    for first in (1, 2, 3, 1):
        assert served.start([first] * 40, None, None, 1)
        served.end(0)
    assert served.hits == [0, 0, 0, 36]


def test_prompts_of_a_trace_hit_whole_hash_ids(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=200, window_pages=100)
    lines = [{"input_length": 1600, "hash_ids": [1, 2, 3, last]} for last in (4, 5)]
    assert serve_prompts(served, lines) == (3 * 512, 2 * 3 * 512)


def test_pools_of_a_model_take_its_memory() -> None:
    """Gemma 3 27B: 10 layers of full attention, 52 of windows of 1,024, 8,192 bytes a token each."""
    pages, window_pages, window = pool_sizes("gemma-3-27b", 10**11, 0.5)
    assert window == 1024 // 32
    assert window_pages == pages // 2
    assert pages == 10**11 // (8192 * (10 + 26)) // 128


def served_with_states(
    classes: dict[str, Any],
    *,
    pages: int,
    page_size: int,
    num_states: int,
    interval: int | None,
    policy: str = "stack",
) -> ServedRequests:
    """A cache of a model with recurrent layers."""
    rows, allocator = StateRows(6, num_states, interval), SlotAllocator(pages * page_size, page_size)
    cache = CACHES[policy][0](
        rows,
        allocator,
        page_size,
        is_hybrid_recurrent=True,
        enable_recurrent_extra_buffer=interval is not None,
        recurrent_track_interval=interval,
    )
    return ServedRequests(cache, allocator, rows, classes, None)


@pytest.mark.parametrize(
    ("pages", "page_size", "num_states", "interval"),
    [(120, 1, 5, None), (300, 1, 20, None), (60, 4, 12, 8), (25, 4, 9, 4)],
)
@pytest.mark.parametrize("policy", CACHES)
@pytest.mark.parametrize("seed", range(2))
def test_hits_of_recurrent_layers_have_the_state_of_their_end(
    seed: int, policy: str, pages: int, page_size: int, num_states: int, interval: int | None, classes: dict[str, Any]
) -> None:
    """The law is in `ServedRequests`; at the end every slot of tokens and of states is free."""
    served = served_with_states(
        classes, pages=pages, page_size=page_size, num_states=num_states, interval=interval, policy=policy
    )
    rows = served.rows
    assert isinstance(rows, StateRows)
    for move in random_moves(seed, 60, 1, turns=True):
        play(served, move)
        served.cache.sanity_check()
        kept = served.cache.recurrent_evictable_size() + served.cache.recurrent_protected_size()
        owned = rows.states_per_request * len(served.running)
        assert len(rows.free_states) + kept + owned == num_states
    assert sum(served.hits) > 0
    served.end_all()
    assert served.allocator.available_size() == pages * page_size
    assert sorted(rows.free_states) == list(range(1, num_states + 1))


def test_kvjax_s_policy_keeps_states_where_prompts_end(classes: dict[str, Any]) -> None:
    """Four prompts in turns with a state at each boundary: slots for the states of their ends, not for all."""
    hits = {}
    for policy in CACHES:
        served = served_with_states(classes, pages=60, page_size=4, num_states=9, interval=8, policy=policy)
        for _ in range(3):
            for n in range(4):
                assert served.start([10 * n + i % 7 for i in range(41)], None, None, 1)
                served.end(0)
        hits[policy] = served.hits
    assert hits["kvjax"] == [0] * 4 + [40] * 8
    assert sum(hits["stack"]) < sum(hits["kvjax"])


def test_a_hit_ends_where_a_state_is_kept(classes: dict[str, Any]) -> None:
    served = served_with_states(classes, pages=80, page_size=1, num_states=4, interval=None)
    prompt = list(range(9))
    served.start(prompt, None, None, 2)
    served.start([*prompt, 20], None, None, 1)
    served.end(0)
    served.start([*prompt, 20], None, None, 1)
    served.start([*prompt[:5], 30], None, None, 1)
    assert served.hits == [0, 0, 9, 0]
    params = classes["MatchPrefixParams"](key=Key(prompt[:5]), full_only=True)
    assert len(served.cache.match_prefix(params).device_indices) == 5
    assert (served.cache.recurrent_evictable_size(), served.cache.supports_recurrent()) == (1, True)
    node = served.cache.match_prefix(classes["MatchPrefixParams"](key=Key(prompt))).last_device_node
    served.cache.inc_lock_ref(node)
    assert served.cache.recurrent_protected_size() == 1
    params = classes["EvictParams"](num_tokens=0, swa_num_tokens=0, dp_rank=0, recurrent_num=1)
    assert served.cache.evict(params).recurrent_num_evicted == 0
    served.cache.dec_lock_ref(node)
    assert served.cache.evict(params).recurrent_num_evicted == 1
    with pytest.raises(BlockStateError, match="a recurrent state was evicted since its prefix was matched"):
        served.cache.inc_lock_ref(node)


def test_recurrent_layers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="expected pages of 1 token or enable_recurrent_extra_buffer, got pages of 4"):
        PrefixCache(None, SlotAllocator(40, 4), 4, is_hybrid_recurrent=True)
    windows = WindowSlotAllocator(40, 20, page_size=1)
    with pytest.raises(NotImplementedError, match="expected full attention beside recurrent layers"):
        PrefixCache(None, windows, 1, sliding_window_size=8, is_hybrid_recurrent=True)


def test_a_prompt_hits_its_full_pages_under_its_namespace_and_rank(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=40, ranks=2)
    prompt = list(range(11))
    for extra_key, rank in (("a", 0), ("a", 0), ("b", 0), ("a", 1), (None, 0)):
        served.start(prompt, extra_key, rank, 1)
        served.end(0)
    assert served.hits == [0, 8, 0, 0, 0]


def test_evicted_first_is_what_was_used_longest_ago_and_of_it_the_tail(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12)
    for first in (0, 100):
        served.start(list(range(first, first + 13)), None, None, 1)
        served.end(0)
    served.cache.match_prefix(classes["MatchPrefixParams"](key=Key(list(range(12)))))
    done = served.cache.evict(classes["EvictParams"](num_tokens=5, swa_num_tokens=0, dp_rank=0))
    assert done.num_tokens_evicted == 8

    def hit(first: int) -> int:
        params = classes["MatchPrefixParams"](key=Key(list(range(first, first + 12))))
        return len(served.cache.match_prefix(params).device_indices)

    assert (hit(0), hit(100)) == (12, 4)
    assert (served.cache.evictable_size(), served.allocator.available_size()) == (16, 32)


def test_a_locked_prefix_is_not_evicted_and_a_lock_says_what_it_holds(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12)
    served.start(list(range(9)), None, None, 1)
    served.end(0)
    node = served.cache.match_prefix(classes["MatchPrefixParams"](key=Key(list(range(9))))).last_device_node
    assert served.cache.inc_lock_ref(node).delta == -8
    assert (served.cache.evictable_size(), served.cache.protected_size(), served.cache.total_size()) == (0, 8, 8)
    everything = classes["EvictParams"](num_tokens=100, swa_num_tokens=0, dp_rank=None)
    assert served.cache.evict(everything).num_tokens_evicted == 0
    with pytest.raises(BlockStateError, match="expected no page held, got 2"):
        served.cache.reset()
    assert served.cache.dec_lock_ref(node) == 8
    assert served.cache.evict(everything).num_tokens_evicted == 8
    with pytest.raises(BlockStateError, match="was evicted since its prefix was matched"):
        served.cache.inc_lock_ref(node)


def test_events_name_the_hits_of_each_rank_in_order(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12, ranks=2, enable_kv_cache_events=True)
    prompt = list(range(9))
    served.start(prompt, None, 1, 1)
    served.end(0)
    hashes = BlockHasher(4, "xxhash_cbor").hash_tokens(np.array(prompt))
    assert served.cache.take_rank_events(0) == []
    (stored,) = served.cache.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == (tuple(hashes), tuple(prompt[:8]), 4)
    assert (stored.parent_block_hash, stored.extra_keys, stored.kind) == (None, None, "full_attention")
    served.start([*prompt[:8], 1, 2, 3, 4, 5], "a", 1, 1)
    served.end(0)
    (of_salt,) = served.cache.take_rank_events(1)
    assert of_salt.extra_keys == (("a",), None, None)
    served.cache.evict(classes["EvictParams"](num_tokens=4, swa_num_tokens=0, dp_rank=1))
    assert served.cache.take_events() == [BlockRemoved((hashes[1],))]
    served.cache.reset()
    assert served.cache.take_events() == [AllBlocksCleared(), AllBlocksCleared()]


def test_events_of_windows_are_of_the_second_group(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12, window_pages=8, enable_kv_cache_events=True)
    served.start(list(range(9)), None, None, 1)
    served.end(0)
    assert [(e.group_idx, e.kind) for e in served.cache.take_events()] == [(0, "full_attention"), (1, "sliding_window")]


def test_a_tombstone_is_revived_under_the_requests_that_run_on_it(classes: dict[str, Any]) -> None:
    """Window pages of a prefix that a request has left behind are evicted, computed anew, and hit again."""
    served = served_by(classes, pages=40, window_pages=24)
    document = list(range(40))
    served.start([*document, 50], None, None, 1)
    evicted = served.cache.evict(classes["EvictParams"](num_tokens=0, swa_num_tokens=100, dp_rank=0))
    assert (evicted.num_tokens_evicted, evicted.swa_num_tokens_evicted) == (0, 28)
    served.start([*document[:20], 60], None, None, 1)
    served.start([*document[:20], 61], None, None, 1)
    assert served.hits == [0, 0, 20]
    served.cache.sanity_check()


def test_finishing_twice_frees_once(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12)
    served.start(list(range(9)), None, None, 1)
    (req,) = served.running
    served.end(0)
    sizes = served.allocator.available_size(), served.cache.evictable_size()
    served.cache.cache_finished_req(req)
    assert (served.allocator.available_size(), served.cache.evictable_size()) == sizes == (40, 8)


def test_without_a_cache_every_slot_returns(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=20, disable=True)
    served.start(list(range(9)), None, None, 2)
    served.end(0)
    served.start(list(range(9)), None, None, 1)
    served.end(0)
    assert served.hits == [0, 0]
    assert served.allocator.available_size() == 80


def test_what_the_stack_has_is_there_with_its_parameters() -> None:
    """But walks of the tree, which kvjax does not have."""
    objects = recorded("sglang_jax")[0]["objects"]
    pairs = {
        "BasePrefixCache": PrefixCache,
        "SWARadixCache": PrefixCache,
        "BaseTokenToKVPoolAllocator": SlotAllocator,
        "PagedTokenToKVPoolAllocator": SlotAllocator,
        "SWATokenToKVPoolAllocator": WindowSlotAllocator,
    }
    walks = {"insert", "full_lru_list_evictable_size", "swa_lru_list_evictable_size", "all_values_flatten"}
    for name, ours in pairs.items():
        for method, parameters in objects[name]["methods"].items():
            if method in walks | {"__init__", "merge_and_sort_free"} or "*args" in parameters:
                continue
            found = parameters_of(inspect.unwrap(getattr(ours, method)))
            wanted = [p for p in parameters if p != "**kwargs"]
            assert found[: len(wanted)] == wanted or method == "full_protected_size", (name, method)


def test_only_the_recorded_version_is_served() -> None:
    rows, allocator = Rows(1), SlotAllocator(40, 4)

    def with_a_new_field(objects: dict[str, Any]) -> None:
        objects["EvictParams"]["fields"].append("mamba_num")

    refused = pytest.raises(UnknownStackError, match="EvictParams has a new field 'mamba_num'")
    with stack_with("sglang_jax", change=with_a_new_field), refused:
        PrefixCache(rows, allocator, 4)


def test_a_request_class_is_refused_by_the_attribute_that_it_lacks(classes: dict[str, Any]) -> None:
    served = served_by(classes, pages=12)
    with pytest.raises(UnknownStackError, match="it lacks 'cache_protected_len'"):
        served.cache.cache_finished_req(object())


def test_bad_settings_are_refused(classes: dict[str, Any]) -> None:
    allocator, windows = SlotAllocator(40, 4), WindowSlotAllocator(40, 20, page_size=4)
    with pytest.raises(ValueError, match="expected page_size 4, got 1"):
        PrefixCache(None, allocator, 1)
    with pytest.raises(ValueError, match="expected a WindowSlotAllocator"):
        PrefixCache(None, allocator, 4, sliding_window_size=8)
    with pytest.raises(ValueError, match="expected sliding_window_size >= 1 for two pools, got None"):
        PrefixCache(None, windows, 4)
    cache = PrefixCache(None, allocator, 4)
    with pytest.raises(NotImplementedError, match="got one that walks the radix tree"):
        cache.root_node.children  # noqa: B018
    with pytest.raises(NotImplementedError, match="expected hicache_storage disable"):
        cache.check_hicache_events()
    with pytest.raises(NotImplementedError, match="got is_eagle"):
        PrefixCache(None, allocator, 4, is_eagle=True)


def test_without_the_stack_one_line_names_it() -> None:
    for name in [n for n in sys.modules if n.startswith("sgl_jax")]:
        del sys.modules[name]
    with pytest.raises(MissingStackError, match=r"needs sglang-jax main-cddbf6f; importing sgl_jax"):
        PrefixCache(None, SlotAllocator(40, 4), 4)
