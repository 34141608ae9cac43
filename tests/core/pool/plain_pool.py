"""The block pool as lists and dicts, one block at a time: what `BlockPool` must agree with."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.core.pool.block_pool_snapshot import BlockPoolSnapshot
from kvjax.core.pool.page_edits import PageEditsSnapshot


class PlainPool:
    """`free` holds the free blocks, next one first; `index` the blocks of each hash per group, first one first."""

    def __init__(self, num_blocks: int, group_ids: Sequence[int], free_order: str) -> None:
        self.num_blocks = num_blocks
        self.free_order = free_order
        self.free = list(range(1, num_blocks))
        self.ref_count = [0] * num_blocks
        self.hash_of: dict[int, tuple[int, bytes]] = {}
        self.index: dict[int, dict[bytes, list[int]]] = {group_id: {} for group_id in group_ids}

    def get(self, count: int) -> list[int]:
        taken = [self.free.pop(0) for _ in range(count)]
        for block_id in taken:
            self.evict([block_id])
            self.ref_count[block_id] = 1
        return taken

    def touch(self, ids: Sequence[int]) -> None:
        for block_id in ids:
            if block_id:
                if self.ref_count[block_id] == 0:
                    self.free.remove(block_id)
                self.ref_count[block_id] += 1

    def can_release(self, ids: Sequence[int]) -> bool:
        return all(list(ids).count(block_id) <= self.ref_count[block_id] for block_id in set(ids) - {0})

    def release(self, ids: Sequence[int]) -> None:
        freed = []
        for block_id in ids:
            if block_id:
                self.ref_count[block_id] -= 1
                if self.ref_count[block_id] == 0:
                    freed.append(block_id)
        if self.free_order == "uncached_first":
            self.free = [b for b in freed if b not in self.hash_of] + self.free
            freed = [b for b in freed if b in self.hash_of]
        self.free += freed

    def register(self, ids: Sequence[int], hashes: Sequence[bytes], group_id: int) -> None:
        for block_id, block_hash in zip(ids, hashes, strict=True):
            if block_id:
                self.hash_of[block_id] = group_id, block_hash
                self.index[group_id].setdefault(block_hash, []).append(block_id)

    def evict(self, ids: Sequence[int]) -> list[tuple[int, bytes]]:
        removed = []
        for block_id in ids:
            if block_id in self.hash_of:
                group_id, block_hash = self.hash_of.pop(block_id)
                self.index[group_id][block_hash].remove(block_id)
                if not self.index[group_id][block_hash]:
                    del self.index[group_id][block_hash]
                removed.append((group_id, block_hash))
        return removed

    def find_run(self, hashes: Sequence[bytes], group_id: int) -> list[int]:
        run = []
        for block_hash in hashes:
            if block_hash not in self.index[group_id]:
                break
            run.append(self.index[group_id][block_hash][0])
        return run

    def reset(self) -> bool:
        if len(self.free) < self.num_blocks - 1:
            return False
        self.hash_of.clear()
        for blocks_by_hash in self.index.values():
            blocks_by_hash.clear()
        return True

    def snapshot(self) -> BlockPoolSnapshot:
        return BlockPoolSnapshot(
            free_order=tuple(self.free),
            ref_count=tuple(self.ref_count),
            blocks_by_hash={
                group_id: {block_hash: tuple(ids) for block_hash, ids in blocks_by_hash.items()}
                for group_id, blocks_by_hash in self.index.items()
            },
            page_edits=PageEditsSnapshot(copies=(), held_sources=(), pages_to_zero=()),
        )
