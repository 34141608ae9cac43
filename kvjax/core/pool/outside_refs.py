"""References to blocks that no block table holds: those of pins, of planned page copies, and of a stack's own code.

Flow:    Pins, PageEdits, adapters -> [OutsideRefs] -> Reservations, CopyOnWrite, checks

Invariant (`check_invariants`):

    O1  `num_blocks` are the blocks with such a reference
"""

from __future__ import annotations

import numpy as np

from kvjax.errors import InvariantError


class OutsideRefs:
    """Outside references of one `BlockPool`, which owns it. They count in `ref_count` too."""

    def __init__(self, num_blocks: int) -> None:
        self.counts = np.zeros(num_blocks, np.int32)  # by block
        self.num_blocks = 0  # with any
        self.lent = np.zeros(num_blocks, np.int32)  # those of `counts` that somebody outside kvjax.core holds

    def add(self, ids: np.ndarray) -> None:  # int64[n]
        """Counts a reference per occurrence of a block."""
        self.num_blocks += np.unique(ids[self.counts[ids] == 0]).size
        np.add.at(self.counts, ids, 1)

    def add_one(self, block_id: int) -> None:
        """`add` of one reference, without the cost of arrays."""
        count = self.counts.item(block_id)
        self.num_blocks += count == 0
        self.counts[block_id] = count + 1

    def drop(self, ids: np.ndarray) -> None:  # int64[n]
        """Takes a reference per occurrence off the count."""
        np.subtract.at(self.counts, ids, 1)
        self.num_blocks -= np.unique(ids[self.counts[ids] == 0]).size

    def lend(self, ids: np.ndarray) -> None:  # int64[n]
        """`add`, for somebody outside kvjax.core, whose references nothing here accounts for."""
        self.add(ids)
        np.add.at(self.lent, ids, 1)

    def take_back(self, ids: np.ndarray) -> None:  # int64[n]
        """`drop` of references that were lent."""
        self.drop(ids)
        np.subtract.at(self.lent, ids, 1)

    def check_invariants(self) -> None:
        """Raises InvariantError if O1 does not hold."""
        num_blocks = int(np.count_nonzero(self.counts))
        if num_blocks != self.num_blocks:
            raise InvariantError(f"O1: {self.num_blocks} blocks counted with outside references, {num_blocks} have one")


__all__ = ["OutsideRefs"]
