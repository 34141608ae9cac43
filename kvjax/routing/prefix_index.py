"""What each replica has cached, by the hashes of blocks that its events tell.

Flow:    BlockStored, BlockRemoved, AllBlocksCleared of a replica -> [PrefixIndex] -> leading blocks of a prompt
Source:  the counts of llm-d's and Dynamo's indexers: a hash that several blocks hold is gone with the last of them

Events are those of `KVCacheManager.take_events`, or of the wire (`EventDecoder`): hashes are numbers of 64 bits, and
digests count as their last 8 bytes. One group is indexed, that of full attention: windows and states do not say how
long a prefix is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.events.encoding import low_64_bits


class PrefixIndex:
    """Used from one thread. A lookup costs a dictionary access for each leading block and replica."""

    def __init__(self, num_replicas: int, group_idx: int = 0) -> None:
        """An index of replicas that have nothing.

        Raises:
            ValueError: no replica, or a negative group.
        """
        if num_replicas < 1 or group_idx < 0:
            raise ValueError(f"expected num_replicas >= 1 and group_idx >= 0, got {num_replicas} and {group_idx}")
        self._group = group_idx
        self._blocks: list[Counter[int]] = [Counter() for _ in range(num_replicas)]

    def apply(self, replica: int, events: Iterable[Any]) -> None:
        """Takes a replica's events, oldest first. A removal of what was never told is passed over."""
        blocks = self._blocks[replica]
        for event in events:
            hashes = getattr(event, "block_hashes", None)
            if hashes is None:  # AllBlocksCleared
                blocks.clear()
            elif (event.group_idx or 0) != self._group:
                continue
            elif hasattr(event, "token_ids"):
                blocks.update(map(_key, hashes))
            else:
                _remove(blocks, hashes)

    def forget(self, replica: int) -> None:
        """Drops what is known of a replica: its events were lost, or it began anew."""
        self._blocks[replica].clear()

    def match(self, block_hashes: Sequence[bytes | int]) -> list[int]:
        """Leading blocks of a prompt that each replica has."""
        keys = list(map(_key, block_hashes))
        return [next((i for i, key in enumerate(keys) if key not in blocks), len(keys)) for blocks in self._blocks]

    def num_blocks(self, replica: int) -> int:
        """Distinct blocks that a replica has."""
        return len(self._blocks[replica])


def _remove(blocks: Counter[int], hashes: Iterable[bytes | int]) -> None:
    for key in map(_key, hashes):
        left = blocks[key] - 1
        if left > 0:
            blocks[key] = left
        else:
            blocks.pop(key, None)


def _key(block_hash: bytes | int) -> int:
    return block_hash if isinstance(block_hash, int) else low_64_bits(block_hash)


__all__ = ["PrefixIndex"]
