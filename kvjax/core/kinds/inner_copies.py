"""Hits that end inside a block: a row gets a copy of it before it writes there.

Flow:    InnerBlockHits notes the column -> [take_first_copy] as the row gets its first blocks -> page copies of a step
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvjax.core.pool.block_pool import BlockPool


class CopyingRows(Protocol):
    """The manager whose rows they are."""

    block_pool: BlockPool
    first_copies: dict[int, int]  # row -> column of a block that it has a reference to and may not write to

    @property
    def block_tables(self) -> np.ndarray:  # int32[G, rows, columns]
        """The tables of all groups."""


def take_first_copy(manager: CopyingRows, row: int) -> np.ndarray | None:
    """int32[G, 1] the copies, which are in the table now; None: the row needs none."""
    column = manager.first_copies.pop(row, None)
    if column is None:
        return None
    entries = manager.block_tables[:, row, column]
    copies = manager.block_pool.page_edits.exchange_and_hold(entries.tolist())
    entries[:] = copies
    return copies[:, None]


__all__ = ["take_first_copy"]
