"""Hits are right: the longest aligned length for which every group finds every block that it needs, and nobody else's.

The naive model tries every length that is a multiple of the alignment and leaves a token to compute, and for each looks
for every block that every group needs, the one that EAGLE drops among them.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.core import BlockHasher, Request
from tests.core.manager.manager_lockstep import SETUPS, Lockstep, Setup
from tests.core.manager.naive_manager import NaiveGroup

CACHING = {
    name: setup
    for name, setup in SETUPS.items()
    if setup.caching
    and not all(group.cross for group in setup.groups)
    and not any(group.mamba == "none" for group in setup.groups)
}  # where there can be hits
MANY_WINDOWS = Setup(
    (NaiveGroup(2, window=9), NaiveGroup(4, window=6), NaiveGroup(6), NaiveGroup(2, window=2)), max_model_len=48
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 5},
    {"window": 11},
    {"window": 8, "latent": True},
    {"chunk": 4},
    {"chunk": 6},
    {"latent": True},
    {"sinks": 1},
    {"cross": True},
    {"mamba": "align"},
    {"mamba": "align", "drafts": 2},
)
BLOCK_SIZES = (2, 4, 6)
NUM_HYBRIDS = settings.default.max_examples * 3 // 5


def check_hits(setup: Setup, seed: int) -> int:
    """Prompts of one family are computed; blocks lose their hashes at random; then every prompt is looked up."""
    rng = np.random.default_rng(seed)
    both = Lockstep(setup, [int(rng.integers(30, 90)) for _ in range(setup.num_pools)])
    trunk = rng.integers(0, 2, setup.max_model_len).tolist()
    for i in range(4):
        length = int(rng.integers(1, setup.max_model_len))
        pair = both.new_pair(f"r{i}", trunk[:length], salt="a" if rng.random() < 0.3 else None)
        if both.allocate_new(pair, int(rng.integers(1, length + 1))):
            while (left := length - pair.naive.computed) > 0 and both.allocate_running(pair, left):
                pass
            if rng.random() < 0.5:
                both.free(pair)
    for pool_id, size in enumerate(both.pool_sizes):
        lost = rng.integers(0, size, int(rng.integers(0, 12))).tolist()
        both.manager.evict_blocks(lost, pool_id)
        both.naive.evict(pool_id, lost)
    if rng.random() < 0.5:
        both.manager.new_step_starts()
        both.naive.new_step_starts()
    found = 0
    for length in range(1, setup.max_model_len + 1):
        for salt in (None, "a"):
            found += both.lookup(both.new_pair("new", trunk[:length], salt))[1] > 0
    both.compare()
    return found


@pytest.mark.parametrize("setup", [*CACHING.values(), MANY_WINDOWS], ids=[*CACHING, "many_windows"])
def test_hits_agree_with_brute_force(setup: Setup) -> None:
    assert sum(check_hits(setup, seed) for seed in range(9)) > 20


def random_hybrid(rng: np.random.Generator) -> Setup:
    """One to four groups of any kinds and block sizes, in one or two pools, with any options that they allow."""
    kinds = [KINDS[i] for i in rng.integers(0, len(KINDS), rng.integers(1, 5))]
    eagle = bool(rng.random() < 0.4) and not any("chunk" in kind for kind in kinds)
    num_pools = int(rng.integers(1, min(len(kinds), 2) + 1))
    groups = tuple(
        NaiveGroup(int(rng.choice(BLOCK_SIZES)), pool=i % num_pools, eagle=eagle and bool(rng.random() < 0.3), **kind)
        for i, kind in enumerate(kinds)
    )
    return Setup(
        groups,
        max_model_len=48,
        eagle=eagle,
        same_step_hits=bool(rng.random() < 0.7),
        coarse_hash_mode=str(rng.choice(["concat", "last"])),
    )


def test_hits_of_random_hybrids_agree_with_brute_force() -> None:
    found = [check_hits(random_hybrid(np.random.default_rng([5, seed])), seed) > 0 for seed in range(NUM_HYBRIDS)]
    assert sum(found) > NUM_HYBRIDS // 2


SALT = st.none() | st.text(min_size=1, max_size=3)


@given(
    name=st.sampled_from(sorted(CACHING)),
    tokens=st.lists(st.integers(0, 1), min_size=13, max_size=24),
    salts=st.lists(SALT, min_size=2, max_size=2, unique=True),
)
def test_no_hit_crosses_salts(name: str, tokens: list[int], salts: list[str | None]) -> None:
    setup = CACHING[name]
    both = Lockstep(setup, [60] * setup.num_pools)
    own, other = salts
    assert both.allocate_new(both.new_pair("a", tokens, own), len(tokens))
    both.manager.new_step_starts()
    both.naive.new_step_starts()
    assert both.manager.get_computed_blocks(both.new_pair("b", tokens, other).request)[1] == 0
    both.lookup(both.new_pair("c", tokens, own))


LOCAL = {"chunk": {"chunk": 8}, "window of 1": {"window": 1}}


@pytest.mark.parametrize("local", LOCAL.values(), ids=LOCAL)
def test_a_group_that_the_next_token_sees_nothing_of_shortens_no_hit(local: dict[str, Any]) -> None:
    """As of Llama 4: where a chunk begins, its layers need no block; full attention alone says how long the hit is."""
    both = Lockstep(Setup((NaiveGroup(2), NaiveGroup(2, **local)), max_model_len=40), [80])
    tokens = list(range(30))
    assert both.allocate_new(both.new_pair("a", tokens), 30)
    full, _ = both.naive.tables["a"]
    both.free(both.pairs["a"])
    of_local = [ids for (group, _), ids in both.naive.pools[0].holders.items() if group == 1]
    assert bool(of_local) == ("chunk" in local)  # what no hit needs is not registered
    for ids in of_local:
        both.manager.evict_blocks(ids)
    both.naive.evict(0, [block for ids in of_local for block in ids])
    hits = []
    for num_full in range(15, 0, -1):
        hits.append(both.lookup(both.new_pair("b", tokens))[1])
        both.manager.evict_blocks(full[num_full - 1 : num_full])
        both.naive.evict(0, full[num_full - 1 : num_full])
    at_every_block = [28, *range(28, 0, -2)]
    assert hits == (at_every_block if "window" in local else [hit // 8 * 8 for hit in at_every_block])


def test_llama_4_hits_at_every_start_of_a_chunk() -> None:
    """Blocks of 16, chunks of 128, a prompt of 400: what vLLM hits as blocks of full attention are lost."""
    setup = Setup(
        (NaiveGroup(16), NaiveGroup(16, chunk=128), NaiveGroup(16, chunk=128)), hash_block_size=16, max_model_len=512
    )
    manager = setup.manager([200])
    hasher = BlockHasher(16, "xxhash_cbor", seed="0")
    request = Request("a", range(400), block_hasher=hasher)
    assert manager.allocate_slots(request, 400) is not None
    full, *chunked = manager.get_block_ids("a")
    manager.free(request)
    for ids in chunked:
        manager.evict_blocks([block for block in ids if block])
    hits = []
    for lost in ([], full[23:], full[15:], full[7:]):
        manager.evict_blocks(lost)
        again = Request("b", range(400), block_hasher=hasher)
        hit, num_tokens = manager.get_computed_blocks(again)
        hits.append(num_tokens)
        assert manager.allocate_slots(again, 400 - num_tokens, num_tokens, hit) is not None
        manager.check_invariants()
        manager.free(again)
    assert hits == [384, 256, 128, 0]


@pytest.mark.parametrize("local", LOCAL.values(), ids=LOCAL)
def test_a_hit_of_layers_that_may_need_no_block_rests_on_its_last_one(local: dict[str, Any]) -> None:
    """A model of such layers alone hits nothing where nothing of it is cached."""
    both = Lockstep(Setup((NaiveGroup(2, **local),), max_model_len=40), [80])
    tokens = list(range(30))
    assert both.lookup(both.new_pair("a", tokens))[1] == 0
    assert both.allocate_new(both.new_pair("a", tokens), 30)
    assert both.lookup(both.new_pair("b", tokens))[1] == 28
