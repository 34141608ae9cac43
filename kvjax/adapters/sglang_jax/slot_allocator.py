"""Token slots of sglang-jax out of kvjax's block pools, one pool a data-parallel rank: the page is the block.

Flow:    ScheduleBatch -> [SlotAllocator] -> BlockPool -> slots; PrefixCache registers, locks and evicts their pages
Source:  PagedTokenToKVPoolAllocator of sgl-project/sglang-jax, srt/mem_cache/allocator.py

Slot `s` lies in page `s // page_size`; page 0 is the null block, whose slots pad. A page is in one of three states:

    free      nobody has it; `available_size` counts these only
    owned     a request has it: `alloc*` gave it, `free` takes it back
    cached    `PrefixCache` has it, with one reference for each lock; evictable without one

Pages without a hash come first in the pool's free order, whatever its eviction policy, so an allocation that
`available_size` covers evicts nothing; one that it does not cover gets None, as in the stack, whose scheduler evicts
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvjax.adapters.sglang_jax.free_group import FreeGroup
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.watch.kv_events import GroupInfo, KVEventLog
from kvjax.errors import BlockStateError


@final
class SlotAllocator:
    """The surface of `PagedTokenToKVPoolAllocator`, and with pages of one token that of `TokenToKVPoolAllocator`.

    Not thread-safe. An allocation costs some 20 us and 10 ns a slot. A call that raises has changed nothing.
    """

    def __init__(
        self,
        size: int,  # tokens of all ranks
        page_size: int,
        kvcache: Any = None,
        debug_mode: bool = False,
        dp_size: int = 1,
        *,
        group_id: int = 0,
        info: GroupInfo | None = None,  # what KV events say; None: full attention
        event_logs: Sequence[KVEventLog] | None = None,  # one a rank, shared with the other group's allocator
        eviction_policy: str = "lru",
    ) -> None:
        self.size, self.page_size, self.dp_size, self.debug_mode = size, page_size, dp_size, debug_mode
        self.size_per_rank = size // dp_size
        self.pages_per_rank = size // page_size // dp_size
        if self.pages_per_rank < 1:
            raise ValueError(f"expected a page of {page_size} tokens for each of {dp_size} ranks, got size {size}")
        self.group_id = group_id
        self._info = GroupInfo(page_size) if info is None else info
        self._eviction_policy = eviction_policy
        self._kvcache = kvcache
        self.event_logs = [KVEventLog() for _ in range(dp_size)] if event_logs is None else list(event_logs)
        self.pools = [self._empty_pool(rank) for rank in range(dp_size)]
        self._free_group = FreeGroup(dp_size)

    @property
    def is_not_in_free_group(self) -> bool:
        """The stack's name for a group that is closed."""
        return not self._free_group.is_open

    # -- reading ------------------------------------------------------------------------------------------------------

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens of the rank's free pages."""
        return self.num_free_pages(dp_rank) * self.page_size

    def num_free_pages(self, dp_rank: int) -> int:
        """The rank's pages that nobody has, cached ones apart."""
        pool = self.pools[dp_rank]
        return pool.num_free_blocks - pool.num_cached_free_blocks

    def cached_pages(self, dp_rank: int) -> tuple[int, int]:
        """The rank's cached pages: those without a lock, which are evictable, and those with one."""
        pool = self.pools[dp_rank]
        return pool.num_cached_free_blocks, pool.num_hashed_blocks - pool.num_cached_free_blocks

    def slots_of(self, pages: np.ndarray) -> np.ndarray:  # int32[k * page_size]
        """All slots of the pages, in order."""
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel().astype(np.int32)

    def get_kvcache(self) -> Any:
        """The stack's pool of arrays."""
        return self._kvcache

    def get_cpu_copy(self, indices: np.ndarray) -> Any:
        """What the stack's pool of arrays says."""
        return self._kvcache.get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: np.ndarray) -> Any:
        """What the stack's pool of arrays says."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices)

    def debug_print(self) -> str:
        """Free tokens of each rank."""
        return f"#available-size: {[self.available_size(rank) for rank in range(self.dp_size)]}, "

    # -- allocating ---------------------------------------------------------------------------------------------------

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:  # int32[need_size]
        """Slots of whole pages; None: too few are free.

        Raises:
            ValueError: `need_size` is no multiple of the page size.
        """
        if need_size % self.page_size:
            raise ValueError(f"expected a multiple of page_size {self.page_size}, got need_size {need_size}")
        pages = self._take(need_size // self.page_size, dp_rank)
        return None if pages is None else self.slots_of(pages)

    def alloc_extend(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: npt.ArrayLike,  # the slot of each request's token `prefix_len - 1`
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> np.ndarray | None:  # int32[extend_num_tokens]
        """Slots of the tokens [prefix_len, seq_len) of each request, one after the other; None: too few are free.

        Raises:
            ValueError: the lengths do not add up, or a last slot is not where the prefix ends.
        """
        prefix, ends, last = (np.asarray(given, np.int64) for given in (prefix_lens, seq_lens, last_loc))
        lengths = ends - prefix
        if lengths.sum() != extend_num_tokens or (lengths < 0).any():
            raise ValueError(f"expected {extend_num_tokens} new tokens, got {lengths.tolist()} by request")
        self.check_last_slots(prefix, last)
        first_new = -(-prefix // self.page_size)
        num_new = -(-ends // self.page_size) - first_new
        pages = self._take(int(num_new.sum()), dp_rank)
        if pages is None:
            return None
        row = np.repeat(np.arange(len(prefix)), lengths)
        position = np.arange(extend_num_tokens) - (np.cumsum(lengths) - lengths - prefix)[row]
        column = position // self.page_size - first_new[row]  # among the request's new pages
        is_new = column >= 0
        place = np.where(is_new, (np.cumsum(num_new) - num_new)[row] + column, -1)
        of_new = np.append(pages, 0)[place] * self.page_size + position % self.page_size
        return np.where(is_new, of_new, last[row] + 1 + position - prefix[row]).astype(np.int32)

    def alloc_decode(
        self, seq_lens: Sequence[int], last_loc: npt.ArrayLike, dp_rank: int = 0
    ) -> np.ndarray | None:  # int32[len(seq_lens)]
        """A slot for the last token of each request, `seq_lens` tokens with it; None: too few are free.

        Raises:
            ValueError: a last slot is not where the tokens before end.
        """
        before, last = np.asarray(seq_lens, np.int64) - 1, np.asarray(last_loc, np.int64)
        self.check_last_slots(before, last)
        is_new = before % self.page_size == 0
        pages = self._take(int(np.count_nonzero(is_new)), dp_rank)
        if pages is None:
            return None
        slots = (last + 1).astype(np.int32)
        slots[is_new] = pages * self.page_size
        return slots

    def check_last_slots(self, lengths: np.ndarray, last: np.ndarray) -> None:
        """Raises ValueError where a request of that length cannot have its last slot there."""
        bad = np.flatnonzero((lengths % self.page_size != 0) & ((last + 1 - lengths) % self.page_size != 0))
        if bad.size:
            given = f"slot {last[bad[0]]} with {lengths[bad[0]]} tokens"
            raise ValueError(f"expected a last slot at a prefix's end in pages of {self.page_size}, got {given}")

    def _take(self, num_pages: int, dp_rank: int) -> np.ndarray | None:
        if num_pages > self.num_free_pages(dp_rank):
            return None
        return take_in_order(self.pools[dp_rank], num_pages)

    # -- freeing ------------------------------------------------------------------------------------------------------

    def free(self, free_index: npt.ArrayLike, dp_rank: int = 0) -> None:
        """Frees the owned pages of these slots, now or at `free_group_end`; slots of page 0 are passed over.

        Raises:
            ValueError: a slot is none of the rank.
            BlockStateError: a page is free, or belongs to the prefix cache. In a group, at its end.
        """
        if self._free_group.holds_back(free_index, dp_rank):
            return
        self.free_pages_of(self.owned_pages(free_index, dp_rank), dp_rank)

    def owned_pages(self, slots: npt.ArrayLike, dp_rank: int) -> np.ndarray:  # int64[k], sorted
        """The pages of the slots but the null one, checked; raises as `free`."""
        pool = self.pools[dp_rank]
        pages = np.unique(np.asarray(slots, np.int64) // self.page_size)
        if pages.size and (pages[0] < 0 or pages[-1] >= pool.num_blocks):
            raise ValueError(f"expected slots of pages 1 to {pool.num_blocks - 1}, got pages {pages.tolist()}")
        pages = pages[pages > 0]
        is_bad = (pool.ref_count[pages] < 1) | pool.is_hashed[pages]
        if is_bad.any():
            page = pages[is_bad][0]
            whose = "belongs to the prefix cache" if pool.is_hashed[page] else "is free"
            raise BlockStateError(f"page {page} of rank {dp_rank} {whose}; free the slots that alloc gave, once")
        return pages

    def free_pages_of(self, pages: np.ndarray, dp_rank: int) -> None:
        """Frees owned pages, the last first."""
        self.pools[dp_rank].free_blocks(pages[::-1])

    def free_group_begin(self) -> None:
        """From here on `free` waits for `free_group_end`."""
        self._free_group.is_open = True

    def free_group_end(self) -> None:
        """Frees what waits."""
        self._free_group.end(self.free)

    def clear(self, dp_rank: int | None = None) -> None:
        """Frees and forgets every page of a rank, or of all."""
        for rank in range(self.dp_size) if dp_rank is None else (dp_rank,):
            emits = self.pools[rank].enable_kv_cache_events
            self.pools[rank] = self._empty_pool(rank)
            self.pools[rank].enable_kv_cache_events = emits
            if emits:
                self.event_logs[rank].note_cleared()
        self._free_group.clear(dp_rank)

    def backup_state(self) -> Any:
        """Refused: pages that were allocated since would stay with the prefix cache."""
        raise NotImplementedError(
            "expected the slots of a draft to be freed: kvjax's pools have no state to go back to"
        )

    def restore_state(self, state: Any) -> None:
        """Refused, as `backup_state`."""
        self.backup_state()

    def _empty_pool(self, rank: int) -> BlockPool:
        pool = BlockPool(
            self.pages_per_rank + 1,
            hash_block_size=self.page_size,
            group_ids=(self.group_id,),
            eviction_policy=self._eviction_policy,
            event_log=self.event_logs[rank],
        )
        pool.register_group(self.group_id, self._info)
        return pool


def take_in_order(pool: BlockPool, num_pages: int) -> np.ndarray:  # int32[num_pages]
    """`get_new_blocks` of the pages that are next in order when those freed last count too."""
    pool.eviction_policy.note_step_planned()
    return pool.get_new_blocks(num_pages)
