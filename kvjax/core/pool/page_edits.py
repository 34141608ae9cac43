"""Pages of one pool that the device has to copy or zero before the next step writes anything.

Flow:    CopyOnWrite, sub-block hits -> [PageEdits] -> KVCacheManager.take_page_copies, take_pages_to_zero -> StepPlan
Source:  ARCHITECTURE.md, "Order inside a step"

A copy's source keeps a reference until the copies are taken, so that nobody writes to it or copies to it first.
Reallocating a destination cancels its pending copy. A copy whose source is itself the destination of a pending copy
reads that copy's source, so no copy waits for another.

Invariants (`check_invariants`):

    E1  a destination is nobody's source, held or cached when it is planned, and never zeroed
    E2  a source is held, with a reference outside the block tables for every copy planned from it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvjax.core.pool.outside_refs import OutsideRefs
from kvjax.errors import InvariantError


@dataclass(frozen=True)
class PageCopies:
    """Pages to copy in one pool before anything is written. No destination is a source."""

    sources: np.ndarray  # int32[C]
    destinations: np.ndarray  # int32[C]


NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.flags.writeable = False
NO_COPIES = PageCopies(NO_PAGES, NO_PAGES)


@dataclass(frozen=True)
class PageEditsSnapshot:
    """What is planned for one pool, comparable."""

    copies: tuple[tuple[int, int], ...]  # (source, destination) in the order of planning
    held_sources: tuple[int, ...]
    pages_to_zero: tuple[int, ...]


class BlockHolder(Protocol):
    """What planned copies need of their pool: blocks, and references that keep sources."""

    num_blocks: int
    ref_count: np.ndarray  # int32[num_blocks]
    outside_refs: OutsideRefs
    is_hashed: np.ndarray  # bool[num_blocks]

    def get_new_blocks(self, num_blocks: int) -> np.ndarray:
        """Takes blocks with one reference each."""

    def touch(self, block_ids: npt.ArrayLike) -> None:
        """Adds one reference per occurrence."""

    def free_held(self, ids: np.ndarray) -> None:
        """Drops one reference per occurrence of int64[n] held blocks."""


class PageEdits:
    """Planned copies and zeroing of one `BlockPool`, which owns it. Costs nothing while there are none."""

    def __init__(self, pool: BlockHolder, zero_new_pages: bool) -> None:
        self._pool = pool
        self._zeroes = zero_new_pages
        self._source_of: dict[int, int] = {}  # destination -> source
        self._held_sources: list[int] = []  # one reference each
        self._to_zero: set[int] = set()
        self.watches = zero_new_pages  # whether `on_new_blocks` has anything to do

    @property
    def held_sources(self) -> np.ndarray:  # int64[n]
        """A block per reference that planned copies hold."""
        return np.array(self._held_sources, np.int64)

    def on_new_blocks(self, block_ids: Iterable[int]) -> None:
        """Notes that blocks are allocated: copies still pending to them are cancelled."""
        ids = list(block_ids)
        for block_id in ids:
            self._source_of.pop(block_id, None)
        if self._zeroes:
            self._to_zero.update(ids)

    def on_loaded(self, block_ids: Iterable[int]) -> None:
        """Notes that tokens from outside are loaded into blocks just allocated, at any time: they are not zeroed."""
        self._to_zero.difference_update(block_ids)

    def exchange_for_copies(self, block_ids: Sequence[int]) -> np.ndarray:  # int32[n]
        """New blocks that get the pages of `block_ids`, of each of which the caller gives up a reference.

        Raises:
            OutOfBlocksError: fewer blocks are free. Nothing is changed.
        """
        new_ids = self._pool.get_new_blocks(len(block_ids))
        for block_id, new_id in zip(block_ids, new_ids.tolist(), strict=True):
            source = self._source_of.get(block_id, block_id)
            if source != block_id:
                self._pool.touch([source])
                self._pool.free_held(np.array([block_id]))
            self._plan_copy(source, new_id)
            self._to_zero.discard(new_id)
        return new_ids

    def exchange_and_hold(self, block_ids: Sequence[int]) -> np.ndarray:  # int32[n]
        """`exchange_for_copies`, whose copies are held until they are taken, though who has them may free them.

        Raises:
            OutOfBlocksError: fewer blocks are free. Nothing is changed.
        """
        new_ids = self.exchange_for_copies(block_ids)
        for new_id in new_ids.tolist():
            self._pool.ref_count[new_id] += 1
            self._hold(new_id)
        return new_ids

    def keep_copy(self, source: int, destination: int) -> None:
        """Plans a copy of a block that somebody holds and writes to; the caller gives up its block `destination`."""
        self._pool.ref_count[source] += 1
        self._plan_copy(source, destination)
        self._hold(destination)

    def _hold(self, block_id: int) -> None:
        """A reference of the block is the plan's."""
        self._held_sources.append(block_id)
        self._pool.outside_refs.add_one(block_id)

    def put_back(self, copies: PageCopies, page_ids: np.ndarray) -> None:
        """Plans copies and int32[Z] pages to zero again that were taken and not done; nothing was allocated since.

        Those of pages that nobody holds any more are dropped.
        """
        is_held = self._pool.ref_count > 0
        for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True):
            if is_held[destination]:
                self._pool.touch([source])
                self._plan_copy(source, destination)
        self._to_zero.update(page_ids[is_held[page_ids]].tolist())

    def _plan_copy(self, source: int, destination: int) -> None:
        """Plans a copy; a reference of the source is its."""
        self._source_of[destination] = source
        self._hold(source)
        self.watches = True

    def lend_copies(self) -> tuple[PageCopies, np.ndarray]:
        """`take_copies` for somebody outside kvjax.core, and int64[n] a block per reference that is theirs now."""
        held = self.held_sources
        self._pool.ref_count[:] += np.bincount(held, minlength=self._pool.num_blocks).astype(np.int32)
        copies = self.take_copies()
        self._pool.outside_refs.lend(held)
        return copies, held

    def take_copies(self) -> PageCopies:
        """The copies planned since the last call, those excepted whose destinations nobody needs any more."""
        if not self._held_sources:
            return NO_COPIES
        needed = [
            (source, destination)
            for destination, source in self._source_of.items()
            if self._pool.ref_count[destination] or self._pool.is_hashed[destination]
        ]
        held = self.held_sources
        self._pool.outside_refs.drop(held)
        self._pool.free_held(held)
        self._source_of.clear()
        self._held_sources.clear()
        self.watches = self._zeroes
        pairs = np.array(needed, np.int32).reshape(-1, 2)
        return PageCopies(pairs[:, 0].copy(), pairs[:, 1].copy())

    def take_pages_to_zero(self) -> np.ndarray:  # int32[Z] ascending
        """The blocks allocated since the last call that neither a copy nor a load fills."""
        if not self._to_zero:
            return NO_PAGES
        ids = np.array(sorted(self._to_zero), np.int32)
        self._to_zero.clear()
        return ids

    def snapshot(self) -> PageEditsSnapshot:
        """What is planned, as values."""
        return PageEditsSnapshot(
            copies=tuple((source, destination) for destination, source in self._source_of.items()),
            held_sources=tuple(self._held_sources),
            pages_to_zero=tuple(sorted(self._to_zero)),
        )

    def check_invariants(self) -> None:
        """Checks E1 and E2.

        Raises:
            InvariantError: one of them is broken.
        """
        destinations, sources = set(self._source_of), set(self._source_of.values())
        if destinations & sources or destinations & self._to_zero:
            raise InvariantError(f"E1: copies to {sorted(destinations)}, from {sorted(sources)}")
        held = np.bincount(self.held_sources, minlength=self._pool.num_blocks)
        if not sources <= set(self._held_sources) or (held > self._pool.outside_refs.counts).any():
            raise InvariantError(f"E2: copies from {sorted(sources)} hold {sorted(self._held_sources)}")


__all__ = ["NO_COPIES", "NO_PAGES", "PageCopies", "PageEdits", "PageEditsSnapshot"]
