"""A pytest plugin: private names of vLLM's pool that its tests read or write, over kvjax's pool.

    cached_block_hash_to_block._cache         the map of hashes, from which tests take entries and put them back
    free_block_queue.fake_free_list_head      the ends of the linked list of free blocks, which tests walk
    single_type_managers[i]._null_block       the pool's null block
    block.block_hash_num_tokens               tokens that the hash of a block stands for
    blocks are compared with `is`
    single_type_managers[i].req_to_blocks[request_id] is kept while the request goes on
    coordinator.retention_interval = n        set once the manager is made
    coordinator._cache_hit_alignment_tokens   tokens of which hits are multiples
    single_type_managers[i].cache_hit_alignment_tokens
    single_type_managers[i]._checkpoints      by request the length and the column of the last step's checkpoint

No scheduler or connector of vLLM reads them, so the adapter does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakSet

from kvjax.adapters.vllm.block_pool import CachedBlocks, FreeBlocks
from kvjax.adapters.vllm.coordinator import Coordinator, SingleTypeManager
from kvjax.core.hashing.block_hash import get_block_hash, get_group_id
from kvjax.core.manager.kv_cache_manager import KVCacheManager as CoreManager
from kvjax.core.pool.block import BlockViews, KVCacheBlock
from kvjax.core.pool.kv_cache_blocks import BlockSequence


class PrivateCache(MutableMapping[Any, Any]):
    """The hashes of a pool; what is taken out can be put back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __copy__(self) -> dict[Any, Any]:
        return dict(self.items())

    def __getitem__(self, key: Any) -> Any:
        found = self._pool.hash_maps[get_group_id(key)].get_blocks(get_block_hash(key))
        if not found:
            raise KeyError(key)
        blocks = {block_id: self._pool.blocks[block_id] for block_id in found}
        return next(iter(blocks.values())) if len(blocks) == 1 else blocks

    def __setitem__(self, key: Any, value: Any) -> None:
        for block in value.values() if isinstance(value, dict) else [value]:
            self._pool.prefix_index.register_few([block.block_id], [get_block_hash(key)], get_group_id(key))
            self._pool.num_cached_free_blocks += block.ref_cnt == 0

    def __delitem__(self, key: Any) -> None:
        value = self[key]
        self._pool.evict_blocks(list(value) if isinstance(value, dict) else [value.block_id])

    def __iter__(self) -> Iterator[Any]:
        hashed = (block.block_hash for block in self._pool.blocks)
        return iter({block_hash for block_hash in hashed if block_hash is not None})

    def __len__(self) -> int:
        return sum(map(len, self._pool.hash_maps.values()))


class LiveBlocks(Sequence[Any]):
    """A request's blocks of one group as they are when read; once it has ended, as they were when last read."""

    def __init__(self, manager: Any, row: int) -> None:
        self._manager, self._row = manager, row
        self._owner = manager._core.request_table.requests[row]
        self._now()

    def _now(self) -> Any:
        core = self._manager._core
        if core.request_table.requests[self._row] is self._owner:
            ids = core.groups.row_block_ids(self._row)[self._manager.kv_cache_group_id]
            self._latest = BlockSequence(core.block_pool, ids)
        return self._latest

    def __len__(self) -> int:
        return len(self._now())

    def __getitem__(self, index: Any) -> Any:
        return self._now()[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._now() == other)

    __hash__ = None  # type: ignore[assignment]


@cache
def one_view(pool: Any, block_id: int) -> KVCacheBlock:
    """The same object at every call."""
    return KVCacheBlock(pool, block_id)


class ListEnd:
    """An end of the list of free blocks, walked as it is when it is read."""

    def __init__(self) -> None:
        self.next_free_block: Any = None
        self.prev_free_block: Any = None


class ListEntry:
    """A free block between its neighbours."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self.next_free_block: Any = None
        self.prev_free_block: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def list_ends(free: Any) -> tuple[ListEnd, ListEnd]:
    """Head and tail of the list; the same two objects at every call."""
    if not hasattr(free, "_ends"):
        free._ends = (ListEnd(), ListEnd())
    head, tail = free._ends
    links = [head, *map(ListEntry, free.get_all_free_blocks()), tail]
    for left, right in pairwise(links):
        left.next_free_block, right.prev_free_block = right, left
    return free._ends


_cores: WeakSet[Any] = WeakSet()  # kvjax's managers


def num_hashed_tokens(block: Any) -> int | None:
    """Known of a hash that ends inside the block, else found in the table of a request that holds it."""
    if block.block_id in block._pool.prefix_index.inner.num_tokens:
        return int(block._pool.prefix_index.inner.num_tokens[block.block_id])
    managers = [m for core in _cores if block._pool in core.block_pools for m in core.groups.managers]
    for manager in managers if block.block_hash is not None else ():
        columns = (manager.block_tables == block.block_id).any(axis=(0, 1)).nonzero()[0]
        if columns.size:
            return int((columns[0] + 1) * manager.block_size)
    return None


def set_retention(coordinator: Any, interval: int | None) -> None:
    """As if the manager had been made with the interval; it has no request."""
    groups = coordinator._core.groups
    groups.options = replace(groups.options, retention_interval=interval)
    groups.retention = groups._make_retention()
    for manager in groups.managers:
        manager.checkpoints = None
    groups._register_what_hits_need()
    if groups.retention is not None:
        groups.retention.reserve_rows(coordinator._core.request_table.capacity)


class RetentionInterval:
    """The attribute, which the adapter only reads."""

    def __get__(self, coordinator: Any, cls: type | None = None) -> Any:
        return coordinator.__dict__["retention_interval"]

    def __set__(self, coordinator: Any, interval: int | None) -> None:
        if "retention_interval" in coordinator.__dict__:
            set_retention(coordinator, interval)
        coordinator.__dict__["retention_interval"] = interval


def checkpoints_of(manager: Any) -> dict[str, tuple[int, int]]:
    """By request id."""
    states, requests = manager._manager.inner_states, manager._core.request_table.requests
    return {requests[row].request_id: tuple(place) for row, place in states.checkpoints.items()}


def pytest_configure() -> None:
    """Gives the adapter's classes the names."""
    make = CoreManager.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _cores.add(self)

    CoreManager.__init__ = noted  # type: ignore[method-assign]
    KVCacheBlock.block_hash_num_tokens = property(num_hashed_tokens)  # type: ignore[attr-defined]
    CachedBlocks._cache = property(lambda self: PrivateCache(self._pool))  # type: ignore[attr-defined]
    FreeBlocks.fake_free_list_head = property(lambda self: list_ends(self)[0])  # type: ignore[attr-defined]
    FreeBlocks.fake_free_list_tail = property(lambda self: list_ends(self)[1])  # type: ignore[attr-defined]
    Coordinator.retention_interval = RetentionInterval()  # type: ignore[assignment]
    Coordinator._cache_hit_alignment_tokens = property(  # type: ignore[attr-defined]
        lambda self: self._core.groups.alignment
    )
    SingleTypeManager.cache_hit_alignment_tokens = property(  # type: ignore[attr-defined]
        lambda self: self._core.groups.alignment
    )
    SingleTypeManager._checkpoints = property(checkpoints_of)  # type: ignore[attr-defined]
    BlockViews._view = lambda self, block_id: one_view(self._pool, block_id)  # type: ignore[method-assign]
    SingleTypeManager._blocks_of = lambda self, row: LiveBlocks(self, row)  # type: ignore[assignment, method-assign, return-value]
    SingleTypeManager._null_block = property(lambda self: self.block_pool.null_block)  # type: ignore[attr-defined]
