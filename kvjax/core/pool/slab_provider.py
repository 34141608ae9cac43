"""What a block pool asks of a memory that it shares with other pools.

Flow:    BlockPool.get_new_blocks, touch -> [SlabProvider] -> SlabMemory
"""

from __future__ import annotations

from typing import Protocol


class SlabProvider(Protocol):
    """The pool's share of a `SlabMemory`."""

    def provide(self, num_blocks: int) -> None:
        """Sees to it that the pool's policy can take so many blocks, if that is possible; the caller takes them."""

    def note_growth(self, num_rows: int) -> None:
        """So many running rows took blocks, each in one group: the next step may do so again."""

    def note_hits(self, num_blocks: int) -> None:
        """So many blocks that were free are held from now on, without `provide`."""


__all__ = ["SlabProvider"]
