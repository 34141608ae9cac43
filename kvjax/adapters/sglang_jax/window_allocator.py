"""Token slots of sglang-jax for models with sliding windows: every slot of full attention has one in a second pool.

Flow:    ScheduleBatch -> [WindowSlotAllocator] -> a SlotAllocator for all tokens, another for those in windows
Source:  SWATokenToKVPoolAllocator of sgl-project/sglang-jax, srt/mem_cache/allocator.py

`full_to_swa_index_mapping` has the second slot of each slot, 0 for none. Both slots of a token have the same offset in
their pages, so a page has one window page or none; `free_swa` takes window pages back as they leave every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from kvjax.adapters.sglang_jax.free_group import FreeGroup
from kvjax.adapters.sglang_jax.slot_allocator import SlotAllocator
from kvjax.core.watch.kv_events import GroupInfo
from kvjax.errors import BlockStateError


@final
class WindowSlotAllocator:
    """The surface of `SWATokenToKVPoolAllocator`. Not thread-safe. A call that raises has changed nothing."""

    eviction_policy: ClassVar[str] = "lru"  # of window pages; with "probation" those that no request ended at go first

    def __init__(
        self,
        size: int,  # tokens of all ranks
        size_swa: int,
        kvcache: Any = None,
        page_size: int = 1,
        dp_size: int = 1,
        *,
        sliding_window: int | None = None,  # told in KV events
    ) -> None:
        pools = (None, None) if kvcache is None else (kvcache.full_kv_pool, kvcache.swa_kv_pool)
        full = SlotAllocator(size, page_size, pools[0], dp_size=dp_size)
        info = GroupInfo(page_size, "sliding_window", sliding_window)
        logs = full.event_logs
        windows = SlotAllocator(
            size_swa,
            page_size,
            pools[1],
            dp_size=dp_size,
            group_id=1,
            info=info,
            event_logs=logs,
            eviction_policy=self.eviction_policy,
        )
        self.size, self.page_size, self.dp_size = size, page_size, dp_size
        self.size_per_rank = full.size_per_rank
        self.full_attn_allocator, self.swa_attn_allocator = full, windows
        self.event_logs = logs
        self._kvcache = kvcache
        num_slots = (full.pages_per_rank + 1) * page_size
        self._mapping = [np.zeros(num_slots, np.int32) for _ in range(dp_size)]
        self._owner = [np.zeros(windows.pages_per_rank + 1, np.int32) for _ in range(dp_size)]  # page of a window page
        self.full_to_swa_index_mapping = self._mapping[0] if dp_size == 1 else self._mapping
        if kvcache is not None:
            kvcache.full_to_swa_index_mapping = self.full_to_swa_index_mapping
        self._free_group = FreeGroup(dp_size)

    @property
    def is_not_in_free_group(self) -> bool:
        """The stack's name for a group that is closed."""
        return not self._free_group.is_open

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def size_full(self) -> int:
        """Tokens of all ranks."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Tokens in windows, of all ranks."""
        return self.swa_attn_allocator.size

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that fit both pools of the rank."""
        return min(self.full_available_size(dp_rank), self.swa_available_size(dp_rank))

    def full_available_size(self, dp_rank: int = 0) -> int:
        """Tokens of free pages."""
        return self.full_attn_allocator.available_size(dp_rank)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Tokens of free window pages."""
        return self.swa_attn_allocator.available_size(dp_rank)

    def count_swa_mapped(self, indices: npt.ArrayLike, dp_rank: int = 0) -> int:
        """How many of the slots have one in the windows' pool."""
        return int(np.count_nonzero(self._mapping[dp_rank][np.asarray(indices)]))

    def window_pages(self, pages: np.ndarray, dp_rank: int) -> np.ndarray:  # int32[n]
        """The window page of each page, 0 for none."""
        return self._mapping[dp_rank][pages * self.page_size] // self.page_size

    def slots_of(self, pages: np.ndarray) -> np.ndarray:  # int32[k * page_size]
        """All slots of the pages, in order."""
        return self.full_attn_allocator.slots_of(pages)

    def get_kvcache(self) -> Any:
        """The stack's pools of arrays."""
        return self._kvcache

    def debug_print(self) -> str:
        """Free tokens of rank 0."""
        full, swa = self.full_available_size(), self.swa_available_size()
        return f"#swa-available-size: {swa}, #full-attn-available-size: {full}, "

    # -- allocating ---------------------------------------------------------------------------------------------------

    def alloc(self, need_size: int, dp_rank: int = 0) -> np.ndarray | None:  # int32[need_size]
        """As `SlotAllocator.alloc`; None: one of the pools has too few."""
        if need_size > self.available_size(dp_rank):
            return None
        return self._both(
            self.full_attn_allocator.alloc(need_size, dp_rank),
            self.swa_attn_allocator.alloc(need_size, dp_rank),
            dp_rank,
        )

    def alloc_extend(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> np.ndarray | None:  # int32[extend_num_tokens]
        """As `SlotAllocator.alloc_extend`; None: one of the pools has too few."""
        prefix, ends, size = np.asarray(prefix_lens, np.int64), np.asarray(seq_lens, np.int64), self.page_size
        swa_last = self._swa_last(prefix, np.asarray(last_loc, np.int64), dp_rank)
        if int((-(-ends // size) + (-prefix // size)).sum()) * size > self.available_size(dp_rank):
            return None
        full = self.full_attn_allocator.alloc_extend(prefix_lens, seq_lens, last_loc, extend_num_tokens, dp_rank)
        swa = self.swa_attn_allocator.alloc_extend(prefix_lens, seq_lens, swa_last, extend_num_tokens, dp_rank)
        return self._both(full, swa, dp_rank)

    def alloc_decode(
        self, seq_lens: Sequence[int], last_loc: Sequence[int], dp_rank: int = 0
    ) -> np.ndarray | None:  # int32[len(seq_lens)]
        """As `SlotAllocator.alloc_decode`; None: one of the pools has too few."""
        before = np.asarray(seq_lens, np.int64) - 1
        swa_last = self._swa_last(before, np.asarray(last_loc, np.int64), dp_rank)
        if int(np.count_nonzero(before % self.page_size == 0)) * self.page_size > self.available_size(dp_rank):
            return None
        full = self.full_attn_allocator.alloc_decode(seq_lens, last_loc, dp_rank)
        return self._both(full, self.swa_attn_allocator.alloc_decode(seq_lens, swa_last, dp_rank), dp_rank)

    def _swa_last(self, lengths: np.ndarray, last: np.ndarray, dp_rank: int) -> np.ndarray:  # int64[n]
        """The windows' slot of each last slot; checked where the page goes on."""
        self.full_attn_allocator.check_last_slots(lengths, last)
        swa_last = self._mapping[dp_rank][last].astype(np.int64)
        lost = np.flatnonzero((lengths % self.page_size != 0) & (swa_last == 0))
        if lost.size:
            raise BlockStateError(f"slot {last[lost[0]]} has none in the windows' pool; free no page that is filled")
        return swa_last

    def _both(self, full: np.ndarray | None, swa: np.ndarray | None, dp_rank: int) -> np.ndarray | None:
        assert full is not None
        assert swa is not None
        self._mapping[dp_rank][full] = swa
        self._owner[dp_rank][swa // self.page_size] = full // self.page_size
        return full

    # -- freeing ------------------------------------------------------------------------------------------------------

    def free(self, free_index: npt.ArrayLike, dp_rank: int = 0) -> None:
        """As `SlotAllocator.free`, with their window pages."""
        if self._free_group.holds_back(free_index, dp_rank):
            return
        pages = self.full_attn_allocator.owned_pages(free_index, dp_rank)
        self.full_attn_allocator.free_pages_of(pages, dp_rank)
        self.free_window_pages(pages, dp_rank)

    def free_swa(self, free_index: npt.ArrayLike, dp_rank: int = 0) -> None:
        """Frees the window pages of slots that a request owns, and leaves the pages; without one nothing happens.

        Raises:
            BlockStateError, ValueError: as `SlotAllocator.free`.
        """
        self.free_window_pages(self.full_attn_allocator.owned_pages(free_index, dp_rank), dp_rank)

    def free_window_pages(self, pages: np.ndarray, dp_rank: int) -> None:
        """Frees the window pages of owned pages."""
        windows = self.window_pages(pages, dp_rank)
        self.unmap(pages, dp_rank)
        self.swa_attn_allocator.free_pages_of(windows[windows > 0], dp_rank)

    def unmap(self, pages: np.ndarray, dp_rank: int) -> None:
        """The pages have no window pages any more, whoever holds those."""
        self._owner[dp_rank][self.window_pages(pages, dp_rank)] = 0
        self._mapping[dp_rank].reshape(-1, self.page_size)[pages] = 0

    def remap(self, pages: np.ndarray, windows: np.ndarray, dp_rank: int) -> None:
        """The full pages have these window pages, which no other page has."""
        offsets = np.arange(self.page_size)
        self._mapping[dp_rank].reshape(-1, self.page_size)[pages] = windows[:, None] * self.page_size + offsets
        self._owner[dp_rank][windows] = pages

    def owners(self, windows: np.ndarray, dp_rank: int) -> np.ndarray:  # int32[n]
        """The page of each window page, 0 for none."""
        return self._owner[dp_rank][windows]

    def free_group_begin(self) -> None:
        """From here on `free` waits for `free_group_end`."""
        self._free_group.is_open = True

    def free_group_end(self) -> None:
        """Frees what waits."""
        self._free_group.end(self.free)

    def clear(self, dp_rank: int | None = None) -> None:
        """Frees and forgets every page of a rank, or of all."""
        self.full_attn_allocator.clear(dp_rank)
        self.swa_attn_allocator.clear(dp_rank)
        for rank in range(self.dp_size) if dp_rank is None else (dp_rank,):
            self._mapping[rank].fill(0)
            self._owner[rank].fill(0)
        self._free_group.clear(dp_rank)

    def backup_state(self) -> Any:
        """Refused, as in the stack."""
        return self.full_attn_allocator.backup_state()

    def restore_state(self, state: Any) -> None:
        """Refused, as in the stack."""
        self.full_attn_allocator.backup_state()
