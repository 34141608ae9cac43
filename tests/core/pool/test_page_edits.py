"""The checker finds copies that wait for each other and sources that anybody may write to; the rest: test_fork.py."""

from __future__ import annotations

import pytest

from kvjax.core import KVCacheManager, Request
from kvjax.errors import InvariantError
from tests.core.manager.manager_lockstep import FULL


def with_a_copy_planned() -> KVCacheManager:
    """A request and its child, which copies block 2 to block 3."""
    manager = FULL.manager([20], zero_new_pages=True)
    request = Request("r", range(3))
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    (child,) = manager.fork(request, 1) or ()
    assert manager.allocate_slots(child, 1) is not None
    assert manager.snapshot().pools[0].page_edits.copies == ((2, 3),)
    return manager


def test_the_checker_finds_a_copy_of_a_copy() -> None:
    edits = with_a_copy_planned().block_pool.page_edits
    edits._source_of[4] = 3
    with pytest.raises(InvariantError, match=r"E1: copies to \[3, 4\], from \[2, 3\]"):
        edits.check_invariants()
    del edits._source_of[4]


def test_the_checker_finds_a_destination_that_is_to_be_zeroed() -> None:
    edits = with_a_copy_planned().block_pool.page_edits
    edits._to_zero.add(3)
    with pytest.raises(InvariantError, match=r"E1: copies to \[3\], from \[2\]"):
        edits.check_invariants()
    edits._to_zero.discard(3)


@pytest.mark.parametrize("num_refs", [-1, 1])
def test_the_checker_finds_a_source_that_is_not_held(num_refs: int) -> None:
    """Neither a copy without a reference nor a reference that the pool does not count."""
    pool = with_a_copy_planned().block_pool
    edits = pool.page_edits
    kept = list(edits._held_sources)
    if num_refs < 0:
        edits._held_sources.clear()
    else:
        edits._held_sources.append(2)
    with pytest.raises(InvariantError, match=r"E2: copies from \[2\] hold \[(2, 2)?\]"):
        edits.check_invariants()
    edits._held_sources[:] = kept
