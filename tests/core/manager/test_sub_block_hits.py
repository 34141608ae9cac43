"""Hits inside blocks: as long as a brute-force search says, copied right, and never in the way of an admission."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.configs import load_model_config
from kvjax.core import BlockHasher, KVCacheManager, MLAAttentionSpec, Request
from kvjax.core.kinds import sub_block_index
from kvjax.core.kinds.sub_block_index import SubBlockIndex
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.errors import InvariantError
from kvjax.planning import plan_kv_cache
from tests.core.manager.manager_lockstep import SETUPS, Lockstep, Setup
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.random_forks import RandomForks
from tests.core.manager.test_prefix_hits import random_hybrid

FOUR = Setup((NaiveGroup(4),), hash_block_size=4, max_model_len=40, same_step_hits=False)
BIG = Setup((NaiveGroup(8), NaiveGroup(4, window=6)), hash_block_size=4, max_model_len=48, same_step_hits=False)
CHUNKED = Setup((NaiveGroup(4, chunk=6), NaiveGroup(8)), hash_block_size=4, max_model_len=48, same_step_hits=False)
MAMBA = Setup(
    (NaiveGroup(12), NaiveGroup(8, mamba="align"), NaiveGroup(4, window=9, pool=1)),
    hash_block_size=4,
    max_model_len=72,
    same_step_hits=False,
)
OWN = {"four": FOUR, "big": BIG, "chunked": CHUNKED, "mamba": MAMBA}
FORKED = {
    name: replace(setup, same_step_hits=False)
    for name, setup in (SETUPS | OWN).items()
    if setup.caching and not setup.eagle and setup.retention is None and name not in ("cross", "mamba_none")
    if not any(group.first for group in setup.groups)  # refused
}
HASHER = BlockHasher(4, "xxhash_cbor", seed="0")


class SubBlockLockstep(Lockstep):
    """As its base, with hits inside blocks, which the naive manager knows nothing of: `brute_force` finds them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.manager = self.setup.manager(self.pool_sizes, sub_block_hits=True)
        self.naive.hits_end_anywhere = True

    def brute_force(self, tokens: list[int], salt: str | None) -> int:
        """The longest length for which every group has all that the next token sees."""
        cut = lcm(*(group.block_size for group in self.setup.groups if group.mamba == "align"))
        longest = 0 if salt is None and self.manager.groups.reads_encoder else len(tokens) - 1
        return next((n for n in range(longest - longest % cut, 0, -cut) if self.is_hit(tokens[:n], salt)), 0)

    def is_hit(self, prefix: list[int], salt: str | None) -> bool:
        n = len(prefix)
        for i, group in enumerate(self.setup.groups):
            size, pool = group.block_size, self.naive.pools[group.pool]
            if group.mamba == "none":
                return False
            columns = set() if group.cross else group.needed_for_hit(n)
            if not group.cross and (n % size or self.naive.needs_last):
                columns.add((n - 1) // size)  # inside a block the next token writes behind the hit's
            for column in columns:
                start, end = column * size, min((column + 1) * size, n)
                if not any(
                    of == i
                    and of_salt == salt
                    and len(theirs) == start + size
                    and list(theirs[:end]) == prefix[:end]
                    and blocks[0] not in self.naive.fresh[group.pool]
                    for (of, (of_salt, _, theirs)), blocks in pool.holders.items()
                ):
                    return False
        return True


def check_hits(setup: Setup, seed: int) -> int:
    """Prompts of one family are computed, blocks lose their hashes at random; then every prompt is looked up."""
    rng = np.random.default_rng(seed)
    both = SubBlockLockstep(setup, [int(rng.integers(30, 90)) for _ in range(setup.num_pools)])
    trunk = rng.integers(0, 2, setup.max_model_len).tolist()
    for i in range(5):
        tokens = list(trunk[: int(rng.integers(1, setup.max_model_len))])
        tokens[-int(rng.integers(1, 9)) :] = rng.integers(0, 2, 2).tolist()
        pair = both.new_pair(f"r{i}", tokens, salt="a" if rng.random() < 0.2 else None)
        if both.allocate_new(pair, int(rng.integers(1, len(tokens) + 1)), use_hit=False):
            while (left := len(tokens) - pair.naive.computed) > 0 and both.allocate_running(pair, left):
                pass
            if rng.random() < 0.5:
                both.free(pair)
        if rng.random() < 0.7:
            both.manager.new_step_starts()
            both.naive.new_step_starts()
    for pool_id, size in enumerate(both.pool_sizes):
        lost = rng.integers(0, size, int(rng.integers(0, 8))).tolist()
        both.manager.evict_blocks(lost, pool_id)
        both.naive.evict(pool_id, lost)
    found = 0
    for length in range(1, setup.max_model_len + 1):
        tokens = trunk[:length] + rng.integers(0, 2, 2).tolist()
        for salt in (None, "a"):
            request = both.new_pair("new", tokens, salt).request
            hit, num_tokens = both.manager.get_computed_blocks(request)
            assert num_tokens == both.brute_force(tokens, salt)
            assert num_tokens % both.manager.smallest_reusable_prefix == 0
            for group, ids in zip(setup.groups, hit.block_ids, strict=True):
                assert ids.size == (0 if group.cross else -(-num_tokens // group.block_size))
            found += num_tokens > 0
    both.manager.check_invariants()
    return found


@pytest.mark.parametrize("name", FORKED)
def test_hits_are_those_of_a_brute_force_search(name: str) -> None:
    found = sum(check_hits(FORKED[name], seed) for seed in range(6))
    assert found > 9 or any(group.mamba == "none" for group in FORKED[name].groups)


def test_hits_of_random_hybrids_are_those_of_a_brute_force_search() -> None:
    setups = [random_hybrid(np.random.default_rng([6, seed])) for seed in range(40)]
    setups = [replace(s, eagle=False, same_step_hits=False) for s in setups if not all(g.cross for g in s.groups)]
    found = [check_hits(setup, seed) > 0 for seed, setup in enumerate(setups)]
    assert sum(found) > len(setups) // 2


SALT = st.none() | st.text(min_size=1, max_size=3)


@given(
    name=st.sampled_from(sorted(FORKED)),
    tokens=st.lists(st.integers(0, 1), min_size=13, max_size=24),
    salts=st.lists(SALT, min_size=2, max_size=2, unique=True),
)
def test_no_hit_crosses_salts(name: str, tokens: list[int], salts: list[str | None]) -> None:
    both = SubBlockLockstep(FORKED[name], [60] * FORKED[name].num_pools)
    own, other = salts
    assert both.allocate_new(both.new_pair("a", tokens, own), len(tokens), use_hit=False)
    both.manager.new_step_starts()
    assert both.manager.get_computed_blocks(both.new_pair("b", tokens, other).request)[1] == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FORKED)
def test_everyone_reads_back_its_own_tokens(name: str, seed: int) -> None:
    """Random hits and forks on a simulated device, in bulk and request by request."""
    options = {"sub_block_hits": True, **[{"zero_new_pages": True}, {"reserve": True}][seed]}
    runs = [RandomForks(FORKED[name], seed, bulk, options) for bulk in (True, False)]
    for _ in range(15):
        for run in runs:
            run.step()
    assert runs[0].snapshots == runs[1].snapshots


# -- one request after another


def computed(manager: KVCacheManager, name: str, tokens: list[int], frees: bool = True, **options: Any) -> Request:
    request = Request(name, tokens, **{"block_hasher": HASHER} | options)
    assert manager.allocate_slots(request, len(tokens)) is not None
    request.num_computed_tokens = len(tokens)
    manager.new_step_starts()
    if frees:
        manager.free(request)
    return request


def hit_of(manager: KVCacheManager, tokens: list[int], **options: Any) -> tuple[tuple[list[int], ...], int]:
    hit, num_tokens = manager.get_computed_blocks(Request("new", tokens, **{"block_hasher": HASHER} | options))
    return hit.get_block_ids() or (), num_tokens


def test_no_column_beyond_the_limit_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window has lost all but its first blocks, so full attention is asked again far below its own longest hit."""
    manager = BIG.manager([60], sub_block_hits=True)
    computed(manager, "a", list(range(48)), frees=False)
    manager.evict_blocks(manager.get_block_ids("a")[1][3:])
    find, asked = SubBlockIndex.find, []

    def noted(self: SubBlockIndex, request: Request, hashes: Any, column: int, num_tokens: int) -> Any:
        asked.append(num_tokens)
        return find(self, request, hashes, column, num_tokens)

    monkeypatch.setattr(SubBlockIndex, "find", noted)
    assert hit_of(manager, [*range(47), 99])[1] == 12
    assert asked
    assert min(asked) >= 1


def test_the_copy_is_the_requests_own_and_the_source_stays_a_hit() -> None:
    manager = FOUR.manager([20], sub_block_hits=True)
    computed(manager, "a", list(range(8)))
    tokens = [0, 1, 2, 3, 4, 5, 66, 67, 68]
    assert hit_of(manager, tokens) == (([1, 2],), 6)
    request = Request("b", tokens, block_hasher=HASHER)
    hit, num_tokens = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 3, num_tokens, hit) is not None
    assert manager.get_block_ids("b") == ([1, 3, 4],)
    (copies,) = manager.take_page_copies()
    assert (copies.sources.tolist(), copies.destinations.tolist()) == ([2], [3])
    manager.new_step_starts()
    assert hit_of(manager, [*range(8), 9]) == (([1, 2],), 8)
    assert hit_of(manager, tokens) == (([1, 3],), 8)


@pytest.mark.parametrize("num_blocks", range(2, 12))
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("must_fit", [False, True])
def test_a_hit_never_makes_an_admission_harder(num_blocks: int, reserve: bool, must_fit: bool) -> None:
    """At every size of the pools: whoever is admitted without a hit is admitted with it."""
    setup = replace(BIG, groups=(NaiveGroup(4), NaiveGroup(4, window=6)))
    for holds in (False, True):
        answers = []
        for uses_hit in (False, True):
            manager = setup.manager([num_blocks], sub_block_hits=True, reserve=reserve)
            first = Request("a", range(6), block_hasher=HASHER, max_tokens=2)
            if manager.allocate_slots(first, 6) is None:
                return
            first.num_computed_tokens = 6
            manager.new_step_starts()
            if not holds:
                manager.free(first)
            request = Request("b", [0, 1, 77], block_hasher=HASHER, max_tokens=1)
            hit, num_tokens = manager.get_computed_blocks(request)
            assert num_tokens == 2
            if uses_hit:
                given = manager.allocate_slots(request, 1, 2, hit, full_sequence_must_fit=must_fit)
            else:
                given = manager.allocate_slots(request, 3, full_sequence_must_fit=must_fit)
            manager.check_invariants()
            answers.append(given is not None)
            if given is not None and uses_hit and manager.block_pool.num_free_blocks == 0:
                request.num_computed_tokens = 3
                request.append_output_token_ids(5)
                assert manager.allocate_slots(request, 1) is not None
        assert answers[1] >= answers[0]


def test_a_source_that_nobody_holds_is_taken_over_where_no_block_is_free_for_a_copy() -> None:
    manager = FOUR.manager([2], sub_block_hits=True)
    computed(manager, "a", [0, 1, 2, 3])
    request = Request("b", [0, 1, 66], block_hasher=HASHER)
    hit, num_tokens = manager.get_computed_blocks(request)
    assert num_tokens == 2
    assert manager.allocate_slots(request, 1, 2, hit) is not None
    assert manager.get_block_ids("b") == ([1],)
    assert [copies.sources.size for copies in manager.take_page_copies()] == [0]
    assert manager.block_pool.num_hashed_blocks == 0


def test_layers_of_several_ratios_are_cut_where_all_can() -> None:
    """The group's own spec is that of one layer; the others' states are longer."""
    specs = [MLAAttentionSpec(block_size=16, head_size=8, dtype="float32", tokens_per_state=n) for n in (2, 8)]
    group = KVCacheGroupSpec(("a", "b"), specs[0], layer_specs=tuple(specs))
    config = KVCacheConfig((KVCachePoolSpec(20),), (group,))
    manager = KVCacheManager(config, 40, 4, same_step_hits=False, sub_block_hits=True)
    assert manager.smallest_reusable_prefix == 8
    computed(manager, "a", list(range(16)))
    assert hit_of(manager, [*range(14), 99])[1] == 8
    request = Request("b", [*range(14), 99], block_hasher=HASHER)
    hit, _ = manager.get_computed_blocks(request)
    with pytest.raises(ValueError, match="expected 14 computed tokens, a multiple of 8, in blocks of 16, got 1"):
        manager.allocate_slots(request, 1, 14, hit)


def test_deepseek_v4_is_cut_between_the_states_of_its_longest_ratio() -> None:
    model = load_model_config("deepseek-v4-flash")
    plan = plan_kv_cache(model.kv_cache_specs(), max_model_len=4096, num_blocks=2_200)
    managers = [KVCacheManager(plan.config, 4096, 4, same_step_hits=False, sub_block_hits=on) for on in (False, True)]
    assert [manager.smallest_reusable_prefix for manager in managers] == [256, 128]
    computed(managers[1], "a", list(range(800)))
    assert hit_of(managers[1], [*range(650), 7, 7])[1] == 640


def test_the_smallest_reusable_prefix() -> None:
    assert FOUR.manager([9]).smallest_reusable_prefix == 4
    assert FOUR.manager([9], sub_block_hits=True).smallest_reusable_prefix == 1
    assert BIG.manager([9]).smallest_reusable_prefix == 8
    assert MAMBA.manager([40, 40]).smallest_reusable_prefix == 24
    assert MAMBA.manager([40, 40], sub_block_hits=True).smallest_reusable_prefix == 8
    assert SETUPS["full_no_caching"].manager([9]).smallest_reusable_prefix == 0
    assert SETUPS["cross"].manager([9]).smallest_reusable_prefix == 0


def test_entries_of_blocks_that_are_gone_are_dropped() -> None:
    manager = FOUR.manager([12], sub_block_hits=True)
    for i in range(200):
        computed(manager, f"r{i}", list(range(10 * i, 10 * i + 8)))
    (only,) = manager.groups.managers
    assert only.sub_blocks is not None
    assert only.sub_blocks.num_entries <= 2 * 11 + 64
    assert hit_of(manager, [1990, 1991, 1992, 1993, 1994, 7])[1] == 5


def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The pairs of token runs that lookups compare from here on."""
    pairs = []

    def num_common(ours: bytes, theirs: bytes) -> int:
        pairs.append((ours, theirs))
        return original(ours, theirs)

    original = sub_block_index._num_common
    monkeypatch.setattr(sub_block_index, "_num_common", num_common)
    return pairs


@pytest.mark.parametrize("num_prompts", [8, 64])
def test_a_lookup_looks_at_few_blocks_however_many_begin_alike(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of 4 tokens, and prompts with one token in common: none of them serves, which the first one tells."""
    spec = MLAAttentionSpec(block_size=8, head_size=8, dtype="float32", tokens_per_state=4)
    config = KVCacheConfig.single_pool(2 * num_prompts + 2, spec)
    manager = KVCacheManager(config, 40, 4, same_step_hits=False, sub_block_hits=True)
    for i in range(num_prompts):
        computed(manager, f"r{i}", [0, *range(10 * i + 10, 10 * i + 17)])
    pairs = compared(monkeypatch)
    assert hit_of(manager, [0, 1, 2, 3, 4, 5, 6, 7, 8])[1] == 0
    assert len(pairs) <= 3
    assert hit_of(manager, [0, *range(50, 57), 8])[1] == 8
    assert hit_of(manager, [0, *range(50, 54), 1, 2, 3, 4])[1] == 4
    assert len(pairs) <= 9


@pytest.mark.parametrize("num_prompts", [8, 64])
def test_a_lookup_passes_over_what_its_own_step_registers(num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts with one beginning a step admits: their blocks are no hits before the next step."""
    manager = FOUR.manager([num_prompts + 2], sub_block_hits=True)
    pairs = compared(monkeypatch)
    for i in range(num_prompts):
        request = Request(f"r{i}", [0, i + 1, 0, 0], block_hasher=HASHER)
        assert manager.get_computed_blocks(request)[1] == 0
        assert manager.allocate_slots(request, 4) is not None
    assert not pairs
    manager.check_invariants()
    manager.new_step_starts()
    assert hit_of(manager, [0, 5, 0, 9])[1] == 3
    assert len(pairs) <= 3


def test_the_index_is_emptied_with_the_pool() -> None:
    manager = BIG.manager([30], sub_block_hits=True)
    computed(manager, "a", list(range(24)))
    indices = [part.sub_blocks for part in manager.groups.managers]
    assert all(index is not None and index.num_entries > 0 for index in indices)
    assert manager.reset_prefix_cache()
    assert all(index is not None and index.num_entries == 0 and not index._siblings for index in indices)
    assert hit_of(manager, list(range(24)))[1] == 0
    computed(manager, "b", list(range(24)))
    assert hit_of(manager, [*range(19), 77, 78])[1] == 19


@given(
    blocks=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=30),
    wanted=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_siblings_come_by_tokens_in_common(blocks: list[list[int]], wanted: list[int]) -> None:
    manager = FOUR.manager([64])
    index = SubBlockIndex(4, manager.block_pool, (0,))
    requests = [Request(f"r{i}", block, block_hasher=HASHER) for i, block in enumerate(blocks)]
    for request in requests:
        index.add(request, request.block_hashes, 0, 1)
    index.check_invariants()
    index.new_step_starts()
    index.check_invariants()
    found = list(index.find(Request("new", wanted, block_hasher=HASHER), [], 0, len(wanted)))
    common = {
        request.block_hashes[0]: next((i for i, token in enumerate(wanted) if token != block[i]), len(wanted))
        for request, block in zip(requests, blocks, strict=True)
    }
    assert [n for n, _ in found] == sorted((n for n in common.values() if n), reverse=True)
    assert all(common[block_hash] == n for n, block_hash in found)


def test_a_cached_block_that_the_index_lacks_breaks_its_law() -> None:
    manager = FOUR.manager([20], sub_block_hits=True)
    computed(manager, "a", list(range(8)))
    block_id = manager.block_pool.get_new_block()
    manager.block_pool.register_few([block_id], [HASHER.hash_tokens(np.arange(90, 94))[0]], 0, 0)
    with pytest.raises(InvariantError, match=r"S1, groups \(0,\): 1 cached blocks are missing"):
        manager.check_invariants()
    manager.evict_blocks([block_id])
    manager.block_pool.free_blocks([block_id])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="enable_caching=True and same_step_hits=False with sub_block_hits"):
        replace(FOUR, same_step_hits=True).manager([9], sub_block_hits=True)
    with pytest.raises(ValueError, match="enable_caching=True and same_step_hits=False with sub_block_hits"):
        replace(FOUR, caching=False).manager([9], sub_block_hits=True)
    with pytest.raises(NotImplementedError, match="sub_block_hits does not work with use_eagle=True"):
        replace(FOUR, eagle=True).manager([9], sub_block_hits=True)
    manager = FOUR.manager([20], sub_block_hits=True)
    computed(manager, "a", list(range(8)))
    request = Request("b", [0, 1, 2, 3, 4, 5, 66], block_hasher=HASHER)
    hit, _ = manager.get_computed_blocks(request)
    before = manager.snapshot()
    with pytest.raises(ValueError, match="expected 4 computed tokens, a multiple of 1, in blocks of 4, got 2 blocks"):
        manager.allocate_slots(request, 1, 4, hit)
    assert manager.snapshot() == before
    plain = FOUR.manager([20])
    computed(plain, "a", list(range(8)))
    blocks = plain.create_kv_cache_blocks([[1, 2]])
    with pytest.raises(ValueError, match="expected 6 computed tokens, a multiple of 4, in blocks of 4, got 2 blocks"):
        plain.allocate_slots(request, 1, 6, blocks)
