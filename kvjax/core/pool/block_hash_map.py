"""Prefix-cache index of one group: block hash -> the blocks that hold it.

Flow:    BlockPool.cache_full_blocks -> [BlockHashToBlockMap] -> BlockPool.find_run (prefix hits)
Source:  semantics of vLLM v1/core/block_pool.py (BlockHashToBlockMap)

A value is the block id, or a dict of ids where two blocks or more hold the same content (dict for its order; ids are
its keys). Such duplicates are kept and never merged: ids that a request has been given never change. Most hashes have
one block. So a bulk call first assumes that every value is a plain id and runs one C loop. Packing the values as C ints
checks that, since a dict or None does not pack; then the call goes one hash at a time.

Keys are raw hashes; the group id is packed in only at the edge (events, views).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter

import numpy as np

FEW_HASHES = 8  # looked up one by one
GROWTH = 8  # of chunks that a run ends in: 8, 64 and then 512 hashes
LARGEST_CHUNK = 512  # hashes that are looked up at once
NO_IDS = np.empty(0, np.int32)


class BlockHashToBlockMap:
    """Index of one group of one pool; owned by the `BlockPool`. `len` counts hashes, not blocks."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int | dict[int, None]] = {}
        self.num_shared = 0  # hashes of two blocks or more

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def contains(self, block_hash: bytes, block_id: int) -> bool:
        """Whether `block_id` is registered under `block_hash`."""
        return block_id in self.get_blocks(block_hash)

    def get_one_block(self, block_hash: bytes) -> int | None:
        """The block that was registered first, or None."""
        value = self._blocks.get(block_hash)
        return next(iter(value)) if isinstance(value, dict) else value

    def get_blocks(self, block_hash: bytes) -> tuple[int, ...]:
        """All blocks of a hash in the order they were registered."""
        value = self._blocks.get(block_hash)
        if isinstance(value, dict):
            return tuple(value)
        return () if value is None else (value,)

    def blocks_of_shared(self, block_hashes: Iterable[bytes]) -> list[list[int]]:
        """All blocks of each hash that has several, in the order they were registered."""
        values = map(self._blocks.get, block_hashes) if self.num_shared else ()
        return [list(value) for value in values if type(value) is dict]

    def get_many(self, block_hashes: Iterable[bytes]) -> np.ndarray:  # int32[n]
        """The first registered block of each hash, -1 where there is none."""
        values = list(map(self._blocks.get, block_hashes, repeat(-1)))
        packed = _pack(values)
        if packed is None:
            values = [next(iter(value)) if isinstance(value, dict) else value for value in values]
            packed = _pack(values)
            assert packed is not None  # ids only
        return np.frombuffer(packed, np.int32)

    def find_run(self, block_hashes: Sequence[bytes], limit: int | None = None) -> np.ndarray:  # int32[k]
        """Blocks of the longest leading run of known hashes, at most `limit` long.

        About 60 ns a hash, most of it Python hashing bytes it has not seen before. Most lookups miss at once or not at
        all: a chunk whose last hash is known is looked up as a whole, one that the run ends in bit by bit. What lies a
        chunk or more behind the first miss is not looked at.
        """
        end = len(block_hashes) if limit is None else min(limit, len(block_hashes))
        if end < 1 or block_hashes[0] not in self._blocks:
            return NO_IDS
        runs: list[np.ndarray] = []
        start, size = 0, FEW_HASHES
        while start < end:
            stop = min(start + LARGEST_CHUNK, end)
            if block_hashes[stop - 1] not in self._blocks:
                stop = min(start + size, stop)
                size *= GROWTH
            chunk = block_hashes[start:stop]
            run = self._find_few(chunk) if stop - start <= FEW_HASHES else self._find_chunk(chunk)
            runs.append(run)
            if run.size < stop - start:
                break
            start = stop
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _find_few(self, block_hashes: Sequence[bytes]) -> np.ndarray:  # int32[k]
        """`find_run` one by one."""
        found: list[int] = []
        for block_hash in block_hashes:
            value = self._blocks.get(block_hash)
            if value is None:
                break
            found.append(value if isinstance(value, int) else next(iter(value)))
        return np.array(found, np.int32)

    def _find_chunk(self, chunk: Sequence[bytes]) -> np.ndarray:  # int32[k]
        """`find_run` of two hashes or more at once."""
        try:
            packed = _pack(itemgetter(*chunk)(self._blocks))
        except KeyError:
            packed = None
        if packed is not None:
            return np.frombuffer(packed, np.int32)
        run = self.get_many(chunk)
        misses = np.flatnonzero(run < 0)
        return run[: misses[0]] if len(misses) else run

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Registers one block after those that hold the same hash."""
        value = self._blocks.setdefault(block_hash, block_id)
        if value == block_id:
            return
        if isinstance(value, dict):
            value[block_id] = None
        else:
            self._blocks[block_hash] = {value: None, block_id: None}
            self.num_shared += 1

    def insert_n(self, block_hashes: Sequence[bytes], block_ids: np.ndarray) -> None:
        """Registers blocks (int64[n], none registered before), one by one in effect."""
        ids = block_ids.tolist()
        num_known = len(self._blocks)
        values = list(map(self._blocks.setdefault, block_hashes, ids))
        if len(self._blocks) - num_known < len(ids):  # a hash was known, or came twice
            for block_hash, block_id, value in zip(block_hashes, ids, values, strict=True):
                if value != block_id:
                    self.insert(block_hash, block_id)

    def pop(self, block_hash: bytes, block_id: int) -> bool:
        """Forgets one block of a hash; False (and no change) where it is not registered."""
        value = self._blocks.get(block_hash)
        if isinstance(value, dict):
            if block_id not in value:
                return False
            del value[block_id]
            if len(value) == 1:
                (self._blocks[block_hash],) = value
                self.num_shared -= 1
            return True
        if value != block_id:
            return False
        del self._blocks[block_hash]
        return True

    def pop_n(self, block_hashes: Sequence[bytes], block_ids: np.ndarray) -> None:
        """Forgets registered blocks (int64[n]), one by one in effect."""
        if self.num_shared and _pack(list(map(self._blocks.get, block_hashes))) is None:  # one of these is shared
            for block_hash, block_id in zip(block_hashes, block_ids.tolist(), strict=True):
                self.pop(block_hash, block_id)
        else:
            for block_hash in block_hashes:
                del self._blocks[block_hash]

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()
        self.num_shared = 0

    def snapshot(self) -> dict[bytes, tuple[int, ...]]:
        """Hash -> its blocks in the order they were registered."""
        return {block_hash: self.get_blocks(block_hash) for block_hash in self._blocks}


def _pack(values: Sequence[object]) -> bytes | None:
    """The values as C ints, or None where one is not an int."""
    try:
        return struct.pack(f"{len(values)}i", *values)
    except struct.error:
        return None
