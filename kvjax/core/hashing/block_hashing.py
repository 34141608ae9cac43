"""Hashes of a request's tokens at the block size of a group.

Flow:    Request.block_hashes -> [BlockHashing] -> lookups and registrations of a group
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvjax.core.hashing.block_hash import BlockHashListWithBlockSize

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash


@dataclass(frozen=True)
class BlockHashing:
    """How hashes of requests become hashes of a group's blocks."""

    hash_block_size: int
    coarse_mode: str = "concat"

    def __post_init__(self) -> None:
        if self.coarse_mode not in ("concat", "last"):
            raise ValueError(f"expected coarse_hash_mode concat or last, got {self.coarse_mode!r}")

    def of_block_size(self, block_hashes: Sequence[BlockHash], block_size: int) -> Sequence[BlockHash]:
        """The hashes themselves, or a live view with one entry per `block_size` tokens."""
        if block_size == self.hash_block_size:
            return block_hashes
        return BlockHashListWithBlockSize(block_hashes, self.hash_block_size, block_size, self.coarse_mode)

    def of_blocks(
        self, block_hashes: Iterable[Sequence[BlockHash]], block_size: int, columns: Iterable[int]
    ) -> list[BlockHash]:
        """The hash of one block of `block_size` tokens for each request, without a view of its other hashes."""
        scale = block_size // self.hash_block_size
        pairs = zip(block_hashes, columns, strict=True)
        if scale > 1 and self.coarse_mode == "concat":
            join: Any = b"".join
            return [join(hashes[column * scale : (column + 1) * scale]) for hashes, column in pairs]
        return [hashes[(column + 1) * scale - 1] for hashes, column in pairs]
