"""Rules in which releases of vLLM differ, each as docs/vllm-differences.md says of kvjax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from tests.core.manager.manager_lockstep import Setup
from tests.core.manager.naive_manager import NaiveGroup

DOC = Path(__file__).parents[3] / "docs" / "vllm-differences.md"
HASHER = BlockHasher(4, "xxhash_cbor", seed="0")


def make(*groups: NaiveGroup, **options: Any) -> KVCacheManager:
    return Setup(groups, hash_block_size=4, max_model_len=64, **options).manager([200])


def compute(manager: KVCacheManager, name: str, num_tokens: int) -> Request:
    request = Request(name, range(num_tokens), block_hasher=HASHER)
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    manager.new_step_starts()
    return request


def hit_of(manager: KVCacheManager, num_tokens: int) -> int:
    return manager.get_computed_blocks(Request("new", range(num_tokens), block_hasher=HASHER))[1]


@pytest.mark.parametrize(
    ("num_tokens", "hybrid", "alone"), [(8, 4, 0), (9, 4, 4), (23, 16, 16), (24, 20, 16), (4, 0, 0)]
)
def test_the_block_that_eagle_drops_may_hold_the_last_token_of_a_hybrid(
    num_tokens: int, hybrid: int, alone: int
) -> None:
    """As in vLLM 0.33: the dropped block is computed again, and the last token with it. A group alone: as ever."""
    for manager, expected in (
        (make(NaiveGroup(4), NaiveGroup(4, window=6), eagle=True), hybrid),
        (make(NaiveGroup(4), eagle=True), alone),
    ):
        compute(manager, "r", 40)
        assert hit_of(manager, num_tokens) == expected


def test_a_window_registers_what_an_aligned_hit_needs() -> None:
    """As in vLLM since 0.22: blocks of 4 beside blocks of 16, a window of two blocks before every 16 tokens."""
    manager = make(NaiveGroup(16), NaiveGroup(4, window=9))
    request = compute(manager, "r", 40)
    window = np.array(manager.get_block_ids("r")[1])
    is_hashed = manager.block_pool.is_hashed[window]
    assert np.flatnonzero(is_hashed).tolist() == [2, 3, 6, 7]
    manager.free(request)
    assert hit_of(manager, 40) == 32
    assert hit_of(manager, 32) == 16


def test_a_window_with_eagle_registers_the_dropped_block_too() -> None:
    manager = make(NaiveGroup(16), NaiveGroup(4, window=5, eagle=True), eagle=True)
    compute(manager, "r", 48)
    is_hashed = manager.block_pool.is_hashed[manager.get_block_ids("r")[1]]
    assert np.flatnonzero(is_hashed).tolist() == [3, 4, 7, 8, 11]


@pytest.mark.parametrize("groups", [(NaiveGroup(4, window=5),), (NaiveGroup(4), NaiveGroup(4, window=5))])
def test_a_window_of_blocks_as_long_as_the_alignment_registers_all(groups: tuple[NaiveGroup, ...]) -> None:
    manager = make(*groups)
    compute(manager, "r", 40)
    assert manager.block_pool.is_hashed[manager.get_block_ids("r")[-1]].all()


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_state_stays_while_drafts_may_be_rejected(drafts: int) -> None:
    """Whatever the device accepts of a step in flight, the state that the next step begins with has its block."""
    manager = make(NaiveGroup(4, mamba="align", drafts=drafts))
    request = compute(manager, "r", 4)
    rng = np.random.default_rng(drafts)
    for _ in range(20):
        settled, new = request.num_computed_tokens, int(rng.integers(1, drafts + 2))
        request.append_output_token_ids([1] * (settled + new - request.num_tokens))
        assert manager.allocate_slots(request, new) is not None
        request.num_computed_tokens += new
        num_more = min(int(rng.integers(1, drafts + 2)), 64 - request.num_computed_tokens)
        request.append_output_token_ids([1] * num_more)
        assert manager.allocate_slots(request, num_more, num_in_flight_tokens=new) is not None
        assert manager.get_block_ids("r")[0][(settled - 1) // 4] > 0
        request.num_computed_tokens = settled + 1  # the drafts are rejected, and so is the step after them
        if request.num_computed_tokens > 48:
            break


def test_external_tokens_that_no_later_token_sees_take_no_block_before_the_step_does() -> None:
    """As in vLLM: in the first pass only full attention takes blocks; that of the window of 1 comes with the step's."""
    manager = make(NaiveGroup(4, window=1), NaiveGroup(4))
    request = Request("r", range(11), block_hasher=HASHER)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=10) is not None
    assert manager.get_block_ids("r") == ([0, 0, 4], [1, 2, 3])


def test_the_page_of_differences_names_what_is_deliberate() -> None:
    text = DOC.read_text().lower()
    for subject in (
        "compressor",
        "eagle",
        "window of 1",
        "common prefix",
        "mode `none`",
        "null block",
        "manager by manager",
        "chunk",
        "external",
        "drafts",
    ):
        assert subject in text
