"""Free blocks in eviction order: the head is handed out next, the tail was released last.

Flow:    BlockPool.free_blocks -> [FreeKVCacheBlockQueue] -> BlockPool.get_new_blocks
Source:  order and operations of vLLM v1/core/kv_cache_utils.py (FreeKVCacheBlockQueue), array-backed

A ring of block ids between two cursors, and for each block the cell that it is in:

    cell           5   6   7   8   9   10  11  12
    ring           | 7 | x | 3 | 9 | x | x | 4 |   |      x: tombstone, its block left from the middle
    head == 5, tail == 12, position[7] == 5, position[3] == 7, position of a block that is not queued == NOT_QUEUED

Cursors only count (up for `append`, down for `prepend`) and are reduced modulo the ring's length to find a cell. A cell
whose block is in another cell is a tombstone. Removal forgets the position and touches no cell.
The ring has two cells a block: when an insertion finds no room, more than half of the cells are tombstones, and the
compaction that follows is paid for by their removals. All costs are O(blocks given), amortised.

An owner may append blocks as young ones, which they are until it sets `num_young` to 0. They are the last ones of the
queue, from the cursor `_first_young` on; while there are any it appends young ones only.

Invariants (`check_invariants`):

    Q1  position[b] is a cell of [head, tail) and ring[position[b]] == b, or position[b] == NOT_QUEUED
    Q2  num_free_blocks == number of queued blocks; tail - head <= ring length
    Q3  num_young of them are in cells from the first young one on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError

NOT_QUEUED = -1


class FreeKVCacheBlockQueue:
    """Queue of distinct block ids out of [0, num_blocks); starts with all of them in id order.

    Owned by one `BlockPool`, not thread-safe. Bulk calls take int64 ids (other integers are converted).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"expected num_blocks >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._ring = np.zeros(2 * num_blocks, np.int64)
        self._ring[:num_blocks] = np.arange(num_blocks)
        self._position = np.arange(num_blocks, dtype=np.int32)
        self._cells = np.arange(
            2 * num_blocks, dtype=np.int32
        )  # slices of it are written to and compared with positions
        self._head = 0
        self._tail = num_blocks
        self.num_young = 0
        self._first_young = num_blocks

    def __len__(self) -> int:
        return self.num_free_blocks

    @property
    def num_old(self) -> int:
        """Blocks before the young ones."""
        return self.num_free_blocks - self.num_young

    def __contains__(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks and self._position.item(block_id) != NOT_QUEUED

    def contains_n(self, block_ids: npt.ArrayLike) -> np.ndarray:  # bool[n]
        """Which of the blocks are queued."""
        return self._position[np.asarray(block_ids, np.int64)] != NOT_QUEUED

    def get_all_free_blocks(self) -> np.ndarray:  # int32[num_free_blocks]
        """The queued blocks, next to be handed out first. O(num_blocks)."""
        return self._live().astype(np.int32)

    # -- taking from the head ---------------------------------------------------------------------------------------

    def popleft(self) -> int:
        """Takes the block at the head.

        Raises:
            OutOfBlocksError: the queue is empty. It is unchanged.
        """
        self._check_available(1)
        ring, position = self._ring, self._position
        head, length = self._head, len(ring)
        block_id = ring.item(head % length)
        while position.item(block_id) != head % length:
            head += 1
            block_id = ring.item(head % length)
        position[block_id] = NOT_QUEUED
        self._forget_cells_before(head + 1, num_taken=1)
        return block_id

    def popleft_n(self, num_blocks: int) -> np.ndarray:  # int32[num_blocks]
        """Takes `num_blocks` blocks from the head, in order.

        Raises:
            OutOfBlocksError: fewer are queued. The queue is unchanged.
        """
        return self.take(num_blocks).astype(np.int32)

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """`popleft_n` with ids that index arrays without a conversion; same errors."""
        num_free, head = self.num_free_blocks, self._head
        if not 0 <= num_blocks <= num_free:
            self._check_available(num_blocks)
        if self._tail - head == num_free:
            end = head + num_blocks
            block_ids = self._read(self._ring, head, num_blocks).copy()
        else:
            block_ids, end = self._scan(num_blocks)
        self._position[block_ids] = NOT_QUEUED
        self.num_free_blocks = num_free - num_blocks
        self._head = end if num_free > num_blocks else self._tail
        return block_ids

    def peek(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """The blocks that `take` would return next; there are as many. Passes tombstones at the head for good."""
        if not num_blocks:
            return self._ring[:0].copy()
        ids, _ = self._scan(num_blocks)
        self._head += (self._position.item(ids[0]) - self._head) % self._ring.size
        return ids

    def _check_available(self, num_blocks: int) -> None:
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocksError(f"needs {num_blocks} blocks, {self.num_free_blocks} free")
        if num_blocks < 0:
            raise ValueError(f"expected num_blocks >= 0, got {num_blocks}")

    def _scan(self, num_blocks: int) -> tuple[np.ndarray, int]:
        """The first `num_blocks` queued blocks past tombstones, and the cursor after the last of them."""
        window = 2 * num_blocks + 64
        while True:
            window = min(window, self._tail - self._head)
            block_ids = self._read(self._ring, self._head, window)
            live = np.flatnonzero(self._position[block_ids] == self._read(self._cells, self._head, window))
            if len(live) >= num_blocks:
                live = live[:num_blocks]
                end = self._head + (int(live[-1]) + 1 if num_blocks else 0)
                return block_ids[live], end
            window *= 4

    def _forget_cells_before(self, cursor: int, num_taken: int) -> None:
        self.num_free_blocks -= num_taken
        self._head = cursor if self.num_free_blocks else self._tail

    # -- removal from the middle ------------------------------------------------------------------------------------

    def remove(self, block_id: int) -> None:
        """Takes one block out of the queue, wherever it is.

        Raises:
            BlockStateError: the block is not queued. The queue is unchanged.
        """
        if block_id not in self:
            raise BlockStateError(f"expected a queued block, got {block_id}, which is not in the free queue")
        self.remove_distinct(np.array([block_id]))

    def remove_n(self, block_ids: npt.ArrayLike) -> None:
        """Takes distinct blocks out of the queue, wherever they are.

        Raises:
            BlockStateError: a block is not queued or given twice. The queue is unchanged.
        """
        ids = np.asarray(block_ids, np.int64)
        positions = self._position[ids]
        if np.count_nonzero(positions == NOT_QUEUED):
            block_id = ids[positions == NOT_QUEUED][0]
            raise BlockStateError(f"expected queued blocks, got {block_id}, which is not in the free queue")
        marks = np.arange(len(ids))
        self._position[ids] = marks
        if np.count_nonzero(self._position[ids] == marks) < len(ids):
            self._position[ids] = positions
            raise BlockStateError(f"expected distinct blocks, got {_first_repeated(ids)} twice")
        self._position[ids] = positions
        self.remove_distinct(ids)

    def remove_distinct(self, ids: np.ndarray) -> None:
        """`remove_n` of blocks (int64[n]) that are known to be distinct and queued."""
        if self.num_young:
            self.num_young -= self._count_young(self._position[ids])
        self._position[ids] = NOT_QUEUED
        self._forget_cells_before(self._head, num_taken=ids.size)

    def _count_young(self, cells: np.ndarray) -> int:
        """How many of int32[n] cells are young blocks'."""
        length = self._ring.size
        return int(np.count_nonzero((cells - self._first_young % length) % length < self._tail - self._first_young))

    # -- insertion --------------------------------------------------------------------------------------------------

    def append(self, block_id: int) -> None:
        """Puts one block at the tail.

        Raises:
            BlockStateError: the block is queued already. The queue is unchanged.
        """
        if block_id in self:
            raise BlockStateError(f"expected a block outside the free queue, got {block_id}, which is in it")
        self.append_few((block_id,))

    def append_few(self, block_ids: Sequence[int], are_young: bool = False) -> None:
        """`append_n` of a few blocks that are known to be distinct and not queued, without the cost of arrays."""
        count, length = len(block_ids), self._ring.size
        if self._tail - self._head + count > length:
            self._make_room(count)
        ring, position = self._ring, self._position
        for cell, block_id in enumerate(block_ids, self._tail % length):
            if cell >= length:
                cell -= length
            ring[cell] = block_id
            position[block_id] = cell
        if are_young:
            if not self.num_young:
                self._first_young = self._tail
            self.num_young += count
        self._tail += count
        self.num_free_blocks += count

    def append_n(self, block_ids: npt.ArrayLike) -> None:
        """Puts distinct blocks at the tail, in the order given: the last one is handed out last.

        Raises:
            BlockStateError: a block is queued already or given twice. The queue is unchanged.
        """
        ids = self._absent_ids(block_ids)
        self._make_room(ids.size)
        if not self._place(ids, self._tail):
            raise BlockStateError(f"expected distinct blocks, got {_first_repeated(ids)} twice")
        self._tail += ids.size
        self.num_free_blocks += ids.size

    def prepend_n(self, block_ids: npt.ArrayLike) -> None:
        """Puts distinct blocks at the head, in the order given: the first one is handed out first.

        Raises:
            BlockStateError: a block is queued already or given twice. The queue is unchanged.
        """
        ids = self._absent_ids(block_ids)
        if not self.prepend_absent(ids):
            raise BlockStateError(f"expected distinct blocks, got {_first_repeated(ids)} twice")

    def append_distinct(self, ids: np.ndarray, are_young: bool = False) -> None:
        """`append_n` of blocks (int64[n]) that are known to be distinct and not queued."""
        count, length = ids.size, self._ring.size
        if self._tail - self._head + count > length:
            self._make_room(count)
        first = self._tail % length
        end = first + count
        if end <= length:
            self._position[ids] = self._cells[first:end]
            self._ring[first:end] = ids
        else:
            self._position[ids] = self._read(self._cells, first, count)
            self._write(first, ids)
        if are_young:
            if not self.num_young:
                self._first_young = self._tail
            self.num_young += count
        self._tail += count
        self.num_free_blocks += count

    def prepend_absent(self, ids: np.ndarray) -> bool:
        """`prepend_n` of blocks (int64[n]) that are known not to be queued; False, and no change, if one repeats."""
        self._make_room(len(ids))
        if not self._place(ids, self._head - len(ids)):
            return False
        self._head -= len(ids)
        self.num_free_blocks += len(ids)
        return True

    def _absent_ids(self, block_ids: npt.ArrayLike) -> np.ndarray:  # int64[n]
        ids = np.asarray(block_ids, np.int64)
        queued = self._position[ids] != NOT_QUEUED
        if queued.any():
            raise BlockStateError(f"expected blocks outside the free queue, got {ids[queued][0]}, which is in it")
        return ids

    def _place(self, ids: np.ndarray, start: int) -> bool:
        """Writes `ids` into the cells from cursor `start`, unless one repeats: it would be in its last cell only."""
        cells = self._read(self._cells, start, len(ids))
        self._position[ids] = cells
        if np.count_nonzero(self._position[ids] == cells) < len(ids):
            self._position[ids] = NOT_QUEUED
            return False
        self._write(start, ids)
        return True

    def _make_room(self, num_blocks: int) -> None:
        if self._tail - self._head + num_blocks > len(self._ring):
            live = self._live()
            self._tail = self._head + len(live)
            self._write(self._head, live)
            self._position[live] = self._read(self._cells, self._head, len(live))
            self._first_young = self._head + self.num_old

    # -- the ring ---------------------------------------------------------------------------------------------------

    def _read(self, ring: np.ndarray, start: int, count: int) -> np.ndarray:  # [count]; a view unless the range wraps
        """What `_ring` or `_cells` holds from cursor `start` on."""
        length = ring.size
        first = start % length
        end = first + count
        return ring[first:end] if end <= length else np.concatenate([ring[first:], ring[: end - length]])

    def _write(self, start: int, ids: np.ndarray) -> None:
        first = start % len(self._ring)
        fits = min(len(ids), len(self._ring) - first)
        self._ring[first : first + fits] = ids[:fits]
        if fits < len(ids):
            self._ring[: len(ids) - fits] = ids[fits:]

    def _live(self) -> np.ndarray:  # int64[num_free_blocks]
        num_cells = self._tail - self._head
        block_ids = self._read(self._ring, self._head, num_cells)
        return block_ids[self._position[block_ids] == self._read(self._cells, self._head, num_cells)]

    def check_invariants(self) -> None:
        """Checks Q1 to Q3. O(num_blocks).

        Raises:
            InvariantError: one of them is broken.
        """
        if not 0 <= self._tail - self._head <= len(self._ring):
            raise InvariantError(f"Q2: {self._tail - self._head} cells in use of {len(self._ring)}")
        queued = np.flatnonzero(self._position != NOT_QUEUED)
        live = self._live()
        if not np.array_equal(np.sort(live), queued):
            raise InvariantError(f"Q1: the ring holds {len(live)} blocks, positions name {len(queued)}, or they differ")
        if len(queued) != self.num_free_blocks:
            raise InvariantError(f"Q2: {self.num_free_blocks} blocks counted as free, {len(queued)} queued")
        if self.num_young and self._count_young(self._position[live[self.num_old :]]) < self.num_young:
            raise InvariantError(f"Q3: {self.num_young} blocks counted as young, one of them lies before the first")


def _first_repeated(ids: np.ndarray) -> int:
    values, counts = np.unique(ids, return_counts=True)
    return int(values[counts > 1][0])
