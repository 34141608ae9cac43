"""Which coordinator and managers a config gets, what a lookup costs, and kinds of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvjax.core import (
    AttentionSpec,
    FullAttentionSpec,
    HybridKVCacheCoordinator,
    KVCacheConfig,
    KVCacheCoordinatorNoPrefixCache,
    KVCacheManager,
    Request,
    UnitaryKVCacheCoordinator,
    WholeSequenceSpec,
    register_kv_cache_spec,
)
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.watch.kv_events import BlockStored
from tests.core.manager.manager_lockstep import FULL, HYBRID, SETUPS, Lockstep, Setup
from tests.core.manager.naive_manager import NaiveGroup


def test_a_lookup_that_misses_asks_few_blocks_of_a_window() -> None:
    """Nothing cached, window of 64 blocks: about one probe per 64 blocks, not one per block."""
    setup = Setup((NaiveGroup(2, window=129),), max_model_len=4_000)
    manager = setup.manager([10])
    probes = []
    find_run = manager.block_pool.find_run

    def counted(block_hashes: list[bytes], group_id: int, limit: int | None = None) -> np.ndarray:
        probes.append(len(block_hashes))
        return find_run(block_hashes, group_id, limit)

    manager.block_pool.find_run = counted  # type: ignore[method-assign]
    both = Lockstep(setup, [10])
    request = both.new_pair("r", list(range(4_000))).request
    assert manager.get_computed_blocks(request)[1] == 0
    assert len(probes) <= 4_000 // 2 // 64 + 1


def ask(setup: Setup, monkeypatch: pytest.MonkeyPatch, evicted: tuple[int, ...] = ()) -> list[tuple[int, int, int]]:
    """Looks up a computed prompt of 48 tokens: (manager, longest length asked for, alignment) of each question.

    `evicted` are columns whose blocks of the last group are not cached any more.
    """
    both = Lockstep(setup, [200] * setup.num_pools)
    tokens = list(range(setup.max_model_len))
    pair = both.new_pair("r", tokens)
    both.allocate_new(pair, len(tokens))
    lost = [both.naive.tables["r"][-1][column] for column in evicted]
    both.manager.evict_blocks(lost, setup.groups[-1].pool)
    both.naive.evict(setup.groups[-1].pool, lost)
    questions: list[tuple[int, int, int]] = []
    for i, manager in enumerate(both.manager.groups.managers):
        start_scan = manager.start_scan

        def counted(lookup: PrefixLookup, i: int = i, start_scan: Callable = start_scan) -> HitScan:
            scan = start_scan(lookup)
            longest = scan.longest

            def asked(max_length: int) -> int:
                questions.append((i, max_length, lookup.alignment))
                return longest(max_length)

            scan.longest = asked
            return scan

        monkeypatch.setattr(manager, "start_scan", counted)
    both.lookup(both.new_pair("s", tokens))
    return questions


def scattered(setup: Setup, num_blocks: int, share: float, seed: int) -> tuple[KVCacheManager, list[bytes]]:
    """A manager that has cached a random share of a prompt's blocks, and all of full attention's; the hashes."""
    rng = np.random.default_rng(seed)
    manager = setup.manager([num_blocks * len(setup.groups) + 1] * setup.num_pools)
    hashes = [rng.bytes(16) for _ in range(num_blocks)]
    for kind in manager.groups.managers:
        for group_id in kind.group_ids:
            chosen = [h for h in hashes if not kind.forgets or rng.random() < share]
            ids = kind.block_pool.get_new_blocks(len(chosen))
            kind.block_pool.register_many(ids, chosen, group_id)
            kind.block_pool.free_blocks(ids)
    return manager, hashes


LOCAL_KINDS = (
    NaiveGroup(2),
    NaiveGroup(2, window=5),
    NaiveGroup(2, window=12),
    NaiveGroup(2, chunk=14),
    NaiveGroup(2, mamba="align"),
    NaiveGroup(2, window=1),
)
FEW_AGREE = Setup(LOCAL_KINDS, max_model_len=5_000)


def test_a_lookup_looks_every_block_of_a_group_up_once_at_most_however_often_groups_disagree() -> None:
    """2,000 blocks of which each group lacks others: hundreds of questions, and no more than 2,000 blocks a group."""
    manager, hashes = scattered(FEW_AGREE, 2_000, 0.6, seed=0)
    looked_up = dict.fromkeys(range(len(LOCAL_KINDS)), 0)
    pool = manager.block_pool
    find_run, find_each = pool.find_run, pool.find_each

    def counted_run(block_hashes: list[bytes], group_id: int, limit: int | None = None) -> np.ndarray:
        run = find_run(block_hashes, group_id, limit)
        looked_up[group_id] += min(run.size + 1, len(block_hashes))
        return run

    def counted_each(block_hashes: list[bytes], group_id: int) -> np.ndarray:
        looked_up[group_id] += len(block_hashes)
        return find_each(block_hashes, group_id)

    pool.find_run, pool.find_each = counted_run, counted_each  # type: ignore[method-assign]
    manager.coordinator.find_longest_cache_hit(hashes, 4_000)
    assert max(looked_up.values()) <= 2_000
    assert sum(looked_up.values()) > 2_500  # it is a hard case


@pytest.mark.parametrize("seed", range(30))
def test_scans_that_go_on_answer_as_lookups_from_the_start(seed: int) -> None:
    """The model asks every manager anew, until all agree."""
    rng = np.random.default_rng(seed)
    kinds = [LOCAL_KINDS[i] for i in rng.permutation(len(LOCAL_KINDS))[: rng.integers(2, len(LOCAL_KINDS) + 1)]]
    setup = Setup(tuple(kinds), max_model_len=400)
    manager, hashes = scattered(setup, 150, float(rng.choice([0.6, 0.8, 0.95])), seed)
    groups = manager.groups
    for max_length in rng.integers(0, 301, 8).tolist():
        length, before = max_length, -1
        while length != before:
            before = length
            for kind in groups.managers:
                lookup = PrefixLookup(hashes, length, groups.alignment, False, groups.needs_last_block)
                length = kind.find_longest_cache_hit(lookup).shape[1] * kind.block_size
        hits, found, _ = manager.coordinator.find_longest_cache_hit(hashes, max_length)
        assert found == length
        for kind in groups.managers:
            lookup = PrefixLookup(hashes, length, groups.alignment, False, groups.needs_last_block)
            expected = kind.find_longest_cache_hit(lookup)
            assert [hits[i].tolist() for i in kind.group_ids] == expected.tolist()


def test_full_attention_is_asked_once_and_first_however_the_groups_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup((NaiveGroup(4, window=6), NaiveGroup(6), NaiveGroup(2, window=3)), max_model_len=48)
    questions = ask(setup, monkeypatch, evicted=(20,))
    assert questions[0] == (1, 47, 12)
    assert [manager for manager, _, _ in questions].count(1) == 1


def test_with_one_other_kind_each_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the window's answer is shorter: nobody can shorten it further."""
    setup = Setup((NaiveGroup(4), NaiveGroup(2, window=5)), max_model_len=48)
    assert ask(setup, monkeypatch, evicted=(21,)) == [(0, 47, 4), (1, 44, 4)]


def test_several_other_kinds_are_asked_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last window lost what 44 and 46 tokens need: the first is asked again from 42."""
    setup = Setup((NaiveGroup(2), NaiveGroup(2, window=5), NaiveGroup(2, window=3)), max_model_len=48)
    assert ask(setup, monkeypatch, evicted=(21, 22)) == [(0, 47, 2), (1, 46, 2), (2, 46, 2), (1, 42, 2)]
    assert ask(setup, monkeypatch) == [(0, 47, 2), (1, 46, 2), (2, 46, 2)]


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (FULL, UnitaryKVCacheCoordinator),
        (HYBRID, HybridKVCacheCoordinator),
        (SETUPS["hybrid_no_caching"], KVCacheCoordinatorNoPrefixCache),
    ],
)
def test_the_config_chooses_the_coordinator(setup: Setup, expected: type) -> None:
    assert type(setup.manager([9]).coordinator) is expected


def test_groups_of_equal_spec_share_a_manager() -> None:
    managers = SETUPS["hybrid_interleaved"].manager([9]).groups.managers
    assert [manager.group_ids for manager in managers] == [(0, 2), (1, 3)]
    assert [manager.kv_cache_spec.kind for manager in managers] == ["sliding_window", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class StickySpec(WholeSequenceSpec, AttentionSpec):
    """A kind of a user's own."""

    @property
    def kind(self) -> str:
        return "sticky"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return -(-max_model_len // self.block_size)


def test_a_kind_of_a_users_own_is_a_class_of_specs() -> None:
    spec = StickySpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(KVCacheConfig.single_pool(9, spec), 40, 4, enable_kv_cache_events=True)
    request = Request("r", range(8), block_hasher=Lockstep(Setup((NaiveGroup(4),), hash_block_size=4), [9]).hasher)
    manager.allocate_slots(request, 8)
    [stored] = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.kind, stored.sliding_window) == ("sticky", None)
    with pytest.raises(NotImplementedError, match="sticky attention does not work with use_eagle=True"):
        KVCacheManager(KVCacheConfig.single_pool(9, spec), 40, 4, use_eagle=True)


def test_two_classes_of_one_name_are_not_both_registered() -> None:
    class FullAttentionSpec(StickySpec):
        pass

    with pytest.raises(ValueError, match="expected a spec class of another name than FullAttentionSpec, which"):
        register_kv_cache_spec(FullAttentionSpec)


def test_a_promoted_window_tells_its_mask_to_events() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=6)
    manager = KVCacheManager(KVCacheConfig.single_pool(9, spec), 40, 4)
    assert manager.block_pool.group_infos[0].sliding_window == 6
