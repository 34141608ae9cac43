"""Presets: what a release of vLLM does, as options of a manager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvjax.core import BlockHasher, KVCacheManager, ManagerOptions, Request
from kvjax.core.kinds.retention import Retention
from kvjax.core.options.release_rules import RELEASES
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
HYBRID = [NaiveGroup(2), NaiveGroup(2, window=5), NaiveGroup(2, chunk=8)]


def make_manager(**options: Any) -> KVCacheManager:
    return KVCacheManager(config_of(HYBRID, [100]), 64, 2, **options)


def cached_columns(manager: KVCacheManager, num_tokens: int, num_answered: int = 0) -> list[list[int]]:
    """Per group the blocks of a prompt and what was answered that are hits once all was computed in one step."""
    request = Request("r", range(num_tokens), block_hasher=HASHER)
    request.append_output_token_ids(range(num_answered))
    assert manager.allocate_slots(request, request.num_tokens) is not None
    request.num_computed_tokens = request.num_tokens
    hashes = list(request.block_hashes)
    manager.free(request)
    found = [manager.block_pool.find_each(hashes, group_id) for group_id in range(len(HYBRID))]
    return [[column for column, block in enumerate(of_group.tolist()) if block > 0] for of_group in found]


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_caches_windows_everywhere_or_at_the_end_of_the_prompt(release: str) -> None:
    """21 tokens: the prompt sent again hits 20, of which its next token sees the last 4 in the window."""
    full, window, chunk = cached_columns(make_manager(options=ManagerOptions.vllm(release)), 21)
    assert full == chunk == list(range(10))
    assert window == (list(range(10)) if release in ("0.16.0", "0.22.1") else [8, 9])


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_reuses_unhashed_blocks_last_or_first(release: str) -> None:
    manager = make_manager(options=ManagerOptions.vllm(release))
    taken = manager.block_pool.get_new_blocks(99).tolist()
    manager.block_pool.cache_full_blocks(
        Request("r", range(4), block_hasher=HASHER), taken[:2], [b"a", b"b"], 0, group_id=0
    )
    manager.block_pool.free_blocks(taken[:3])
    order = manager.block_pool.eviction_policy.order().tolist()
    manager.block_pool.free_blocks(taken[3:])
    assert order == (taken[:3] if release in ("0.16.0", "0.22.1") else [taken[2], *taken[:2]])


def test_what_0_33_added_for_eagle_0_32_does_not_keep() -> None:
    """The shared prefix less the block that EAGLE drops."""
    lengths = {ends: Retention(0, 4, 4, ends).lengths_for(30, 16) for ends in ("vllm-0.32", "vllm-0.33")}
    assert lengths == {"vllm-0.32": (24, 24, 16, 0), "vllm-0.33": (24, 24, 16, 12)}


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_a_request_that_was_preempted_has_the_ends_of_its_prompt(release: str) -> None:
    """The 16 tokens that it had answered are computed with the prompt, and end at no checkpoint."""
    full, window, _ = cached_columns(make_manager(options=ManagerOptions.vllm(release)), 21, num_answered=16)
    assert (full, window) == (list(range(18)), [8, 9])


def test_another_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a release of vLLM of 0\.16\.0, .*, 0\.33\.0, got '0\.24\.0'"):
        ManagerOptions.vllm("0.24.0")


def test_a_keyword_counts_more_than_the_options_given() -> None:
    options = ManagerOptions.vllm("0.33.0")
    assert make_manager(options=options).options == options
    assert make_manager(options=options, retention_interval=None).options == replace(options, retention_interval=None)


def test_an_interval_that_is_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="expected retention_interval of tokens, 'auto' or None, got 'often'"):
        make_manager(retention_interval="often")


def test_the_interval_is_chosen_where_a_kind_forgets() -> None:
    """The least multiple of all block sizes from 512 tokens on."""
    sizes = KVCacheManager(config_of([NaiveGroup(6), NaiveGroup(4, window=5)], [99]), 64, 2, retention_interval="auto")
    assert sizes.groups.retention is not None
    assert sizes.groups.retention.interval == 516
    for config, options in (([NaiveGroup(2)], {}), (HYBRID, {"enable_caching": False})):
        plain = KVCacheManager(config_of(config, [99]), 64, 2, retention_interval="auto", **options)
        assert plain.groups.retention is None
