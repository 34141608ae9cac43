"""kvjax's cache manager with EasyDeL's surface, called as its scheduler calls its own.

EasyDeL is not installed here. `scripts/stack_caches.py easydel` makes the same calls of EasyDeL's own manager.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvjax.adapters.easydel import CacheManager, CachePages, install, uninstall
from kvjax.adapters.signatures import parameters_of, recorded
from kvjax.errors import MissingStackError, UnknownStackError
from scripts.stack_checks.easydel_manager import Engine, answers
from tests.adapters.stand_ins import stack_with

PAGE = 4


@dataclass
class FullAttentionSpec:
    """As in EasyDeL 0.3.0."""

    page_size: int = PAGE
    num_kv_heads: int = 1
    head_size: int = 8
    dtype: Any = np.float32
    use_mla: bool = False
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass
class SlidingWindowSpec:
    """As in EasyDeL 0.3.0."""

    page_size: int = PAGE
    num_kv_heads: int = 1
    head_size: int = 8
    dtype: Any = np.float32
    use_mla: bool = False
    sliding_window: int = 10


@dataclass
class CacheGroupSpec:
    """As in EasyDeL 0.3.0."""

    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)
    layer_names: list[str] | None = None


def new_manager(num_pages: int = 40, *, hybrid: bool = False, **options: Any) -> CacheManager:
    groups = [CacheGroupSpec(), *[CacheGroupSpec(SlidingWindowSpec())] * hybrid]
    return CacheManager(num_pages, groups, 96, **options)


def start(manager: CacheManager, request: Engine, **shards: Any) -> tuple[int, CachePages | None]:
    """The hit of a request, and its new pages."""
    pages, hit = manager.get_computed_pages(request, **shards)
    made = manager.allocate_slots(request, request.num_tokens - hit, hit, pages, **shards)
    request.num_computed_tokens = request.num_tokens
    return hit, made


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_leave_every_page_free(seed: int, num_shards: int, hybrid: bool) -> None:
    """The last answer: all pages but page 0 are free, and the cache can be reset."""
    manager = new_manager(hybrid=hybrid)
    given = list(answers(manager, "RUNNING", seed, num_shards))
    for core in manager.managers:
        core.check_invariants()
    assert given[-1] == (39, True)
    assert sum(answer[0] for answer in given if isinstance(answer, tuple) and len(answer) == 3) > 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_request_s_pages_are_of_its_shard_and_nobody_else_s(hybrid: bool) -> None:
    manager = new_manager(hybrid=hybrid)
    requests = [Engine(str(i), list(range(100 * i, 100 * i + 9)), None) for i in range(4)]
    for i, request in enumerate(requests):
        start(manager, request, dp_shard_hint=i, data_parallel_size=4)
    held = [manager.get_page_ids(request.request_id) for request in requests]
    for i, ids in enumerate(held):
        assert {page // 10 for group in ids for page in group} == {i}
    counts = Counter(page for ids in held for group in ids for page in group)
    assert max(counts.values()) == 1
    assert 0 not in counts


def test_a_hit_decides_the_shard_and_a_hint_where_to_look() -> None:
    manager = new_manager()
    tokens = list(range(12))
    start(manager, Engine("a", tokens, None), dp_shard_hint=1, data_parallel_size=2)
    assert manager.get_computed_pages(Engine("b", tokens, None), dp_shard_hint=0, data_parallel_size=2)[1] == 0
    request = Engine("c", [*tokens, 1], None)
    assert start(manager, request, data_parallel_size=2)[0] == 12
    assert {page // 20 for page in manager.get_page_ids("c")[0]} == {1}
    start(manager, Engine("d", list(range(50, 60)), None), data_parallel_size=2)
    assert {page // 20 for page in manager.get_page_ids("d")[0]} == {0}


def test_what_does_not_fit_a_shard_changes_nothing_though_the_hit_was_there() -> None:
    """The stack needs `rollback_new_computed_pages` for that."""
    manager = new_manager(8)
    tokens = list(range(8))
    first = Engine("a", tokens, None)
    start(manager, first, dp_shard_hint=1, data_parallel_size=2)
    manager.free(first)
    before = manager.managers[1].snapshot()
    request = Engine("b", [*tokens, *range(30)], None)
    shards = {"dp_shard_hint": 1, "data_parallel_size": 2}
    pages, hit = manager.get_computed_pages(request, **shards)
    assert hit == 8
    assert manager.allocate_slots(request, 30, hit, pages, **shards) is None
    assert manager.managers[1].snapshot() == before
    assert manager.get_page_ids("b") == ([],)
    assert manager.page_pool.get_num_free_pages() == 7


def test_pages_have_the_stack_s_names() -> None:
    manager = new_manager(hybrid=True)
    hit, made = start(manager, Engine("a", list(range(9)), None))
    assert (hit, made is not None) == (0, True)
    assert made is not None
    page = made.pages[0][0]
    assert (page.page_id, page.ref_cnt, page.is_null, page.page_hash is None) == (1, 1, False, False)
    assert (made + made.new_empty()).get_page_ids() == made.get_page_ids() == ([1, 2, 3], [4, 5, 6])
    assert CachePages(made.pages[:1]).get_unhashed_page_ids() == [3]
    with pytest.raises(ValueError, match="too many values"):
        made.get_unhashed_page_ids()
    assert len(manager.page_pool.cached_page_hash_to_page) == 4
    assert manager.usage == manager.page_pool.get_usage() == pytest.approx(6 / 39)
    assert not manager.page_pool.reset_prefix_cache()


def test_images_keep_equal_tokens_apart() -> None:
    manager = new_manager()
    hits = []
    for number, image in enumerate(["x", "x", "y"]):
        request = Engine(str(number), list(range(9)), None)
        request.has_vision, request.mm_features = True, [SimpleNamespace(modality="image", mm_hash=image)]  # type: ignore[attr-defined]
        hits.append(start(manager, request)[0])
    assert hits == [0, 8, 0]


def test_delayed_pages_become_hits_when_they_are_cached() -> None:
    manager = new_manager()
    request = Engine("a", list(range(9)), None)
    manager.allocate_slots(request, 9, delay_cache_pages=True)
    other = Engine("b", list(range(9)), None)
    assert manager.get_computed_pages(other)[1] == 0
    manager.cache_pages(request, 8)
    assert manager.get_computed_pages(other)[1] == 8
    other.sampling_params.prompt_logprobs = 1
    assert manager.get_computed_pages(other)[1] == 0


def test_without_a_cache_nothing_is_a_hit() -> None:
    manager = new_manager(enable_caching=False)
    assert [start(manager, Engine(name, list(range(9)), None))[0] for name in "ab"] == [0, 0]


def test_shared_pages_are_counted_in_their_shard() -> None:
    manager = new_manager(hybrid=True)
    tokens = list(range(8))
    requests = [Engine(str(i), [*tokens, i], None) for i in range(3)]
    for request in requests:
        start(manager, request)
    assert manager.get_num_common_prefix_pages(requests[0], 3) == [2, 0]
    assert manager.get_num_common_prefix_pages(requests[0], 4) == [0, 0]


def test_what_the_stack_has_is_there_with_its_parameters() -> None:
    for name, ours in (("CacheManager", CacheManager), ("CachePages", CachePages)):
        for method, parameters in recorded("easydel")[0]["objects"][name]["methods"].items():
            assert parameters_of(getattr(ours, method)) == parameters, (name, method)


def test_another_division_is_refused() -> None:
    manager = new_manager()
    start(manager, Engine("a", [1, 2], None), data_parallel_size=2)
    with pytest.raises(ValueError, match="expected data_parallel_size 2 as before, got 4"):
        manager.get_computed_pages(Engine("b", [1, 2], None), data_parallel_size=4)


def test_unknown_specs_and_requests_are_refused_by_name() -> None:
    @dataclass
    class MambaSpec:
        page_size: int = PAGE

    class Unlike(FullAttentionSpec):
        pass

    Unlike.__name__ = "SlidingWindowSpec"
    with pytest.raises(NotImplementedError, match="got MambaSpec: EasyDeL caches no prefix of it"):
        CacheManager(40, [CacheGroupSpec(MambaSpec())], 96)
    with pytest.raises(UnknownStackError, match="SlidingWindowSpec has a new field 'attention_chunk_size'"):
        CacheManager(40, [CacheGroupSpec(Unlike())], 96)
    with pytest.raises(UnknownStackError, match="it lacks 'all_token_ids'"):
        new_manager().get_computed_pages(SimpleNamespace())


class KvjaxPolicy(CacheManager):  # type: ignore[misc]
    """What `install(policy="kvjax")` has the scheduler make."""

    policy = "kvjax"


def turns(cls: type[CacheManager]) -> list[int]:
    """Hits of four prompts in turns, whose pages of full attention and of last windows fit."""
    manager = cls(56, [CacheGroupSpec(), CacheGroupSpec(SlidingWindowSpec(sliding_window=6))], 96)
    hits = []
    for turn in range(3):
        for n in range(4):
            request = Engine(f"{turn} {n}", [100 * n + i for i in range(41)], None)
            pages, hit = manager.get_computed_pages(request)
            hits.append(hit)
            given: tuple[Any, ...] = (hit, pages)
            while (done := request.num_computed_tokens or hit) < 41:
                step = min(8, 41 - done)
                assert manager.allocate_slots(request, step, *given) is not None
                request.num_computed_tokens, given = done + step, ()
            manager.free(request)
            manager.managers[0].check_invariants()
    return hits


def test_kvjax_s_policy_keeps_windows_where_prompts_end() -> None:
    """The stack's rules keep all windows, so that in turn each evicts what the next prompt needs."""
    assert turns(CacheManager) == [0] * 12
    assert turns(KvjaxPolicy) == [0] * 4 + [40] * 8


def test_kvjax_s_policy_keeps_the_window_where_prompts_part() -> None:
    """The second prompt finds full attention alone; where it parts is a checkpoint from then on."""
    shared, hits = list(range(16)), []
    manager = KvjaxPolicy(60, [CacheGroupSpec(), CacheGroupSpec(SlidingWindowSpec(sliding_window=6))], 96)
    for n in range(3):
        request = Engine(f"{n}", [*shared, *range(100 * n + 100, 100 * n + 125)], None)
        hits.append(start(manager, request)[0])
        manager.free(request)
        pool = manager.managers[0].block_pool
        _, on_probation, *_ = pool.eviction_policy.state()
        pool.evict_blocks(on_probation)
    assert hits == [0, 0, 16]


def test_install_has_the_scheduler_make_kvjax_s_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_POLICY", raising=False)
    with pytest.raises(MissingStackError, match=r"needs easydel 0\.3\.0"):
        install()
    with stack_with("easydel") as made:
        name = "easydel.inference.esurge.scheduler.scheduler"
        scheduler: Any = ModuleType(name)
        scheduler.CacheManager = made["CacheManager"]
        sys.modules["easydel.inference.esurge.scheduler"] = ModuleType("easydel.inference.esurge.scheduler")
        sys.modules[name] = scheduler
        install()
        install()
        assert scheduler.CacheManager is CacheManager
        install(policy="kvjax")
        assert scheduler.CacheManager.policy == "kvjax"
        with pytest.raises(ValueError, match=r"expected policy of 'stack' .*, got 'easydel'"):
            install(policy="easydel")
        assert issubclass(scheduler.CacheManager, CacheManager)
        monkeypatch.setenv("KVJAX_POLICY", "kvjax")
        install(policy="stack")
        assert scheduler.CacheManager is CacheManager
        install()
        assert scheduler.CacheManager is not CacheManager
        uninstall()
        assert scheduler.CacheManager is made["CacheManager"]
