"""Kinds say the same for one row and for many, and the checker finds every broken law."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvjax.core import KVCacheManager, Request, SingleTypeKVCacheManager
from kvjax.errors import InvariantError
from tests.core.manager.manager_lockstep import FULL, HYBRID, SETUPS, WINDOW, Setup
from tests.core.manager.naive_manager import NaiveGroup


@pytest.mark.parametrize("setup", [FULL, WINDOW, SETUPS["window_1"], SETUPS["full_coarse"]])
def test_one_row_and_many_agree(setup: Setup) -> None:
    [manager] = setup.manager([9]).groups.managers
    computed = np.arange(60)
    skipped = manager.get_num_skipped_tokens(computed)
    assert skipped.tolist() == [manager.get_num_skipped_tokens(n) for n in range(60)]
    for live in range(20):
        release = manager.tokens_until_release(live)
        assert release == manager.tokens_until_release(np.array([live]))[0]
        gone = np.flatnonzero(skipped // manager.block_size > live)
        assert (gone.size == 0) if release > 59 else (release == gone[0])


@pytest.mark.parametrize("window", range(1, 9))
def test_a_window_skips_what_its_next_token_does_not_see(window: int) -> None:
    """Token n sees n - window + 1 to n."""
    manager = SETUPS["window"].manager([9]).groups.managers[0]
    object.__setattr__(manager.kv_cache_spec, "sliding_window", window)
    for computed in range(30):
        unseen = [token for token in range(computed) if token < computed - window + 1]
        assert manager.get_num_skipped_tokens(computed) == len(unseen)


@pytest.mark.parametrize("plans", [False, True], ids=["allocate_slots", "plan_step"])
def test_the_last_group_gave_its_unhashed_blocks_back_last(plans: bool) -> None:
    """With `uncached_first` its blocks are therefore the next to be used, as if each group had a manager of its own."""
    group = NaiveGroup(2, window=3)
    manager = Setup((group, group), caching=False, uncached_first=True).manager([10])
    request = Request("r", range(7))
    manager.allocate_slots(request, 6)
    assert manager.get_block_ids("r") == ([1, 2, 3], [4, 5, 6])
    request.num_computed_tokens = 6
    if plans:
        assert manager.plan_step([request.row], 1).num_planned == 1
    else:
        assert manager.allocate_slots(request, 1) is not None
    assert manager.get_block_ids("r") == ([0, 0, 3, 5], [0, 0, 6, 4])
    assert manager.snapshot().pools[0].free_order == (2, 1, 7, 8, 9)
    manager.free(request)
    assert manager.snapshot().pools[0].free_order == (4, 6, 5, 3, 2, 1, 7, 8, 9)


def running() -> tuple[KVCacheManager, SingleTypeKVCacheManager, int]:
    """A hybrid manager with one request of 7 tokens, the first two outside the windows."""
    manager = HYBRID.manager([20])
    request = Request("r", range(7))
    manager.allocate_slots(request, 7)
    manager.remove_skipped_blocks("r", 7)
    return manager, manager.groups.managers[1], request.row


BREAKS: dict[str, Callable[[SingleTypeKVCacheManager, int], tuple[np.ndarray, tuple[int, ...] | int, int]]] = {
    r"G1, groups \(1, 2\): expected 0 <= first_live <= num_blocks": lambda m, row: (m.first_live, row, 9),
    r"G1, groups \(1, 2\): a row has more registered blocks": lambda m, row: (m.num_cached_blocks, row, 5),
    r"G2, groups \(1, 2\): expected null blocks exactly outside": lambda m, row: (m.block_tables, (0, row, 0), 3),
    r"G2, groups \(1, 2\): a block id is outside its pool of 20": lambda m, row: (m.block_tables, (0, row, 3), 20),
    r"G2, groups \(1, 2\): a block id is outside its pool of 20 ": lambda m, row: (m.block_tables, (0, row, 3), 21),
    r"M1: pool 0, block 8: 0 owners, ref_count 1": lambda m, row: (m.block_tables, (0, row, 3), 19),
}


@pytest.mark.parametrize("message", BREAKS)
def test_the_checker_finds(message: str) -> None:
    manager, windows, row = running()
    array, index, value = BREAKS[message](windows, row)
    kept, array[index] = array[index], value
    with pytest.raises(InvariantError, match=message):
        manager.check_invariants()
    array[index] = kept
    manager.check_invariants()


def test_the_checker_finds_rows_without_a_request() -> None:
    manager, windows, row = running()
    with pytest.raises(InvariantError, match=r"G3, groups \(1, 2\): a row that no request owns holds blocks"):
        windows.check_invariants([])
    manager.row_blocks.idle_until[row] += 1
    with pytest.raises(InvariantError, match=f"M3: row {row} is idle past its next allocation, registration or"):
        manager.check_invariants()
    manager.row_blocks.idle_until[row] -= 1
