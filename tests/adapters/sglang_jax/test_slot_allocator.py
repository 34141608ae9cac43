"""Slots by the definition: token t of a request lies at offset t mod page_size of the request's page t // page_size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.adapters.sglang_jax import SlotAllocator, WindowSlotAllocator
from kvjax.errors import BlockStateError

PAGES = 12


def new_allocator(page_size: int, windows: bool) -> SlotAllocator | WindowSlotAllocator:
    size = PAGES * page_size
    return WindowSlotAllocator(size, size, page_size=page_size) if windows else SlotAllocator(size, page_size)


@settings(max_examples=60)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    windows=st.booleans(),
    calls=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=12),
)
def test_tokens_of_a_request_fill_its_pages_in_order(page_size: int, windows: bool, calls: list[list[int]]) -> None:
    """Each call extends some of three requests; a call that does not fit gives nothing and changes nothing."""
    allocator = new_allocator(page_size, windows)
    slots: list[list[int]] = [[], [], []]
    for call in calls:
        before = [len(row) for row in slots[: len(call)]]
        after = [b + n for b, n in zip(before, call, strict=True)]
        last = [row[-1] if row else -1 for row in slots[: len(call)]]
        room = allocator.available_size()
        needed = sum(-(-a // page_size) - -(-b // page_size) for a, b in zip(after, before, strict=True)) * page_size
        is_decode = call == [1] * len(call)
        found = (
            allocator.alloc_decode(after, last) if is_decode else allocator.alloc_extend(before, after, last, sum(call))
        )
        assert (found is None) == (needed > room)
        if found is None:
            assert allocator.available_size() == room
            continue
        assert allocator.available_size() == room - needed
        assert found.dtype == np.int32
        ends = np.cumsum(call)
        for i, part in enumerate(np.split(found, ends[:-1])):
            slots[i] += part.tolist()
        pages = [[s // page_size for s in row[::page_size]] for row in slots]
        for row, of_row in zip(slots, pages, strict=True):
            assert row == [of_row[t // page_size] * page_size + t % page_size for t in range(len(row))]
        in_use = [page for of_row in pages for page in of_row]
        assert len(set(in_use)) == len(in_use)
        assert 0 not in in_use
    for row in slots:
        allocator.free(np.array(row, np.int32))
    assert allocator.available_size() == PAGES * page_size
    if windows:
        assert not allocator.full_to_swa_index_mapping.any()


def test_a_slot_of_the_windows_has_the_offset_of_its_slot() -> None:
    allocator = WindowSlotAllocator(40, 24, page_size=4, dp_size=2)
    slots = allocator.alloc_extend([0], [6], [-1], 6, dp_rank=1)
    assert slots is not None
    swa = allocator.full_to_swa_index_mapping[1][slots]
    assert (swa % 4 == slots % 4).all()
    assert swa.all()
    assert allocator.count_swa_mapped(slots, 1) == 6
    allocator.free_swa(slots[:4], 1)
    assert allocator.count_swa_mapped(slots, 1) == 2
    assert (allocator.full_available_size(1), allocator.swa_available_size(1)) == (12, 8)
    assert (allocator.full_available_size(0), allocator.swa_available_size(0)) == (20, 12)


@pytest.mark.parametrize("windows", [False, True])
def test_frees_of_a_group_wait_for_its_end(windows: bool) -> None:
    allocator = new_allocator(4, windows)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free_group_begin()
    allocator.free(slots[:3])
    allocator.free(slots[3:])
    assert allocator.available_size() == (PAGES - 2) * 4
    allocator.free_group_end()
    assert allocator.available_size() == PAGES * 4


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_slots_are_those_that_were_freed_and_allocated_whatever_their_arrays_hold_later(
    windows: bool, seed: int
) -> None:
    """The stack's arrays are views of a table that it writes, and a group of frees waits for its end."""
    rng, allocator = np.random.default_rng(seed), new_allocator(4, windows)
    table = np.stack([allocator.alloc(8) for _ in range(3)])
    before = allocator.available_size()
    allocator.free_group_begin()
    for row in rng.permutation(3)[:2].tolist():
        allocator.free(table[row])
        table[row] = rng.integers(0, 40, 8)
    allocator.free_group_end()
    assert allocator.available_size() == before + 16
    taken = allocator.alloc(16)
    taken[...] = 1
    assert allocator.available_size() == before


@pytest.mark.parametrize("windows", [False, True])
def test_slots_are_freed_once(windows: bool) -> None:
    allocator = new_allocator(4, windows)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free(np.append(slots, 0))
    with pytest.raises(BlockStateError, match=r"page \d+ of rank 0 is free; free the slots that alloc gave, once"):
        allocator.free(slots)
    with pytest.raises(ValueError, match="expected slots of pages 1 to 12"):
        allocator.free(np.array([200]))


@pytest.mark.parametrize("windows", [False, True])
def test_calls_that_cannot_be_are_refused(windows: bool) -> None:
    allocator = new_allocator(4, windows)
    with pytest.raises(ValueError, match="expected a multiple of page_size 4, got need_size 3"):
        allocator.alloc(3)
    with pytest.raises(ValueError, match="expected 5 new tokens, got"):
        allocator.alloc_extend([0], [4], [-1], 5)
    with pytest.raises(ValueError, match="expected a last slot at a prefix's end"):
        allocator.alloc_extend([3], [4], [4], 1)
    with pytest.raises(NotImplementedError, match="expected the slots of a draft to be freed"):
        allocator.backup_state()
    assert allocator.alloc(4 * PAGES + 4) is None
    assert allocator.available_size() == 4 * PAGES


def test_clear_frees_the_pages_of_a_rank() -> None:
    allocator = WindowSlotAllocator(40, 24, page_size=4, dp_size=2)
    for rank in (0, 1):
        allocator.alloc(8, rank)
    allocator.clear(1)
    assert [allocator.full_available_size(rank) for rank in (0, 1)] == [12, 20]
    allocator.clear()
    assert [allocator.available_size(rank) for rank in (0, 1)] == [12, 12]


def test_a_rank_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a page of 16 tokens for each of 4 ranks, got size 32"):
        SlotAllocator(32, 16, dp_size=4)
