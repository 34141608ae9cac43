"""A prefix that sglang-jax's scheduler knows as a tree node, and what of it a rank's pools do on its behalf.

Flow:    PrefixCache -> [RankPages] -> BlockPool.find_run, touch, cache_full_blocks, free_blocks

A `CachedPrefix` names pages; it holds none of them. A lock is a reference to each of its pages, and to each of its
window pages, which are those that the next token's window sees.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from kvjax.adapters.sglang_jax.slot_allocator import SlotAllocator, take_in_order
from kvjax.adapters.sglang_jax.window_allocator import WindowSlotAllocator
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.hashing.extra_keys import ExtraKeys, LoRARequest
from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import BlockStateError


def _no_pages() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """What the stack keeps as `last_node`: compared by identity, the root without pages."""

    dp_rank: int = 0
    hashes: Sequence[BlockHash] = ()
    pages: np.ndarray = field(default_factory=_no_pages)  # int32[n]
    window_pages: np.ndarray = field(default_factory=_no_pages)  # int32[w], 0 where there is none
    num_shared: int = 0  # pages of full attention when it was found, where windows under probation had less
    state_hash: BlockHash | None = None  # of the last page, where a lock keeps the recurrent state after it

    @property
    def children(self) -> Any:
        """Refused: kvjax keeps hashes of prefixes and no tree."""
        raise NotImplementedError("expected schedule policy lpm, fcfs or random, got one that walks the radix tree")


@dataclass(frozen=True)
class CachedTokens:
    """Tokens under a namespace, in the form that KV events read."""

    token_ids: np.ndarray  # int64[num_tokens]
    extra_keys: ExtraKeys | None  # None: no namespace
    lora: LoRARequest | None = None

    @property
    def has_extra_keys(self) -> bool:
        """Whether a namespace decides the hashes too."""
        return self.extra_keys is not None

    def event_extra_keys(self, first_block: int, end_block: int, block_size: int) -> list[tuple[Any, ...] | None]:
        """Extra keys of the blocks."""
        assert self.extra_keys is not None
        starts = range(first_block * block_size, end_block * block_size, block_size)
        return [self.extra_keys.event_keys_of_block(start, start + block_size) for start in starts]


class RankPages(abc.ABC):
    """What a prefix cache asks of the pages of one data-parallel rank."""

    @abc.abstractmethod
    def find(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """The longest cached prefix, which becomes the most recently used one."""

    @abc.abstractmethod
    def lock(self, prefix: CachedPrefix) -> None:
        """Adds a reference to what `prefix` names.

        Raises:
            BlockStateError: some of it was evicted since it was found. Nothing is changed.
        """

    @abc.abstractmethod
    def unlock(self, prefix: CachedPrefix) -> None:
        """Drops a reference, the last page first; raises BlockStateError if there is none."""

    @abc.abstractmethod
    def extend(
        self, prefix: CachedPrefix, own: np.ndarray, hashes: Sequence[BlockHash], tokens: CachedTokens
    ) -> CachedPrefix:
        """Caches `own` (int32[n], owned pages behind `prefix`), and turns a lock of `prefix` into one of all.

        Pages whose hashes are cached already are freed, and the cached ones take their places.
        """

    @abc.abstractmethod
    def keep(self, prefix: CachedPrefix) -> None:
        """A prompt or an answer ends there: under "probation" what a hit of it needs outlives what others need."""

    @abc.abstractmethod
    def evict(self, num_pages: int, num_window_pages: int) -> tuple[int, int]:
        """Frees at least that many of the least recently used pages, or what there is; how many were freed."""

    @abc.abstractmethod
    def pools(self) -> tuple[BlockPool, ...]:
        """The pools of the rank."""


@final
class FullPages(RankPages):
    """Pages of full attention."""

    def __init__(self, allocator: SlotAllocator, rank: int) -> None:
        self._allocator, self._rank = allocator, rank

    @property
    def _pool(self) -> BlockPool:
        return self._allocator.pools[self._rank]

    def find(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """The leading run of cached pages."""
        pages = self._pool.find_run(hashes, 0)
        refresh(self._pool, pages)
        return CachedPrefix(self._rank, hashes[: len(pages)], pages)

    def lock(self, prefix: CachedPrefix) -> None:
        """A reference to each page."""
        check_cached(self._pool, prefix.pages, prefix.hashes, 0)
        self._pool.touch(prefix.pages)

    def unlock(self, prefix: CachedPrefix) -> None:
        """Drops a reference to each page."""
        self._pool.free_blocks(prefix.pages[::-1])

    def extend(
        self, prefix: CachedPrefix, own: np.ndarray, hashes: Sequence[BlockHash], tokens: CachedTokens
    ) -> CachedPrefix:
        """See `RankPages`."""
        path, _ = cache_pages(self._pool, prefix.pages, own, hashes, tokens)
        return CachedPrefix(self._rank, hashes, path)

    def keep(self, prefix: CachedPrefix) -> None:
        """A page is worth as much as any other."""

    def evict(self, num_pages: int, num_window_pages: int) -> tuple[int, int]:
        """Window pages there are none."""
        return len(evict_pages(self._pool, num_pages)), 0

    def pools(self) -> tuple[BlockPool, ...]:
        """One."""
        return (self._pool,)


@final
class WindowedPages(RankPages):
    """Pages of full attention and window pages: a hit needs those of the last `sliding_window` tokens.

    A cached page without its window page is what the stack calls a tombstone. It has one again when a request computes
    its tokens anew. Window pages are on probation until a hit used them, unless a prompt or an answer ends there, or a
    prompt parts there from what full attention has cached.
    """

    def __init__(self, allocator: WindowSlotAllocator, rank: int, sliding_window: int) -> None:
        self._allocator, self._rank = allocator, rank
        self._num_needed = -(-sliding_window // allocator.page_size)

    @property
    def _full(self) -> BlockPool:
        return self._allocator.full_attn_allocator.pools[self._rank]

    @property
    def _windows(self) -> BlockPool:
        return self._allocator.swa_attn_allocator.pools[self._rank]

    def find(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """The longest leading run whose last pages have window pages."""
        pages = self._full.find_run(hashes, 0)
        columns = np.arange(1, len(pages) + 1)
        has_window = self._allocator.window_pages(pages, self._rank) > 0
        last_missing = np.maximum.accumulate(np.where(has_window, 0, columns)) if len(pages) else columns
        good = np.flatnonzero(last_missing <= np.maximum(columns - self._num_needed, 0))
        prefix = self._named(pages[: int(good[-1]) + 1 if good.size else 0], hashes)
        if self._windows.eviction_policy.knows_probation and len(prefix.pages) < len(pages):
            prefix = replace(prefix, num_shared=len(pages))
        refresh(self._full, prefix.pages)
        refresh(self._windows, prefix.window_pages)
        return prefix

    def lock(self, prefix: CachedPrefix) -> None:
        """A reference to each page and to each window page."""
        hashes = prefix.hashes[len(prefix.pages) - len(prefix.window_pages) :]
        check_cached(self._full, prefix.pages, prefix.hashes, 0)
        real = np.flatnonzero(prefix.window_pages)
        check_cached(self._windows, prefix.window_pages[real], [hashes[i] for i in real.tolist()], 1)
        self._full.touch(prefix.pages)
        self._windows.touch(prefix.window_pages)

    def unlock(self, prefix: CachedPrefix) -> None:
        """Drops a reference to each page and to each window page."""
        self._full.free_blocks(prefix.pages[::-1])
        self._windows.free_blocks(prefix.window_pages[::-1])

    def extend(
        self, prefix: CachedPrefix, own: np.ndarray, hashes: Sequence[BlockHash], tokens: CachedTokens
    ) -> CachedPrefix:
        """See `RankPages`. A window page goes over to the cached page of its hash, if that has none."""
        own_windows = self._allocator.window_pages(own, self._rank)
        path, was_known = cache_pages(self._full, prefix.pages, own, hashes, tokens)
        places = path[len(prefix.pages) :]
        has_other = was_known & (self._allocator.window_pages(places, self._rank) > 0)
        self._allocator.unmap(own[was_known], self._rank)
        moves = was_known & ~has_other & (own_windows > 0)
        self._allocator.remap(places[moves], own_windows[moves], self._rank)
        new_windows = np.where(has_other, 0, own_windows)
        self._windows.cache_full_blocks(tokens, new_windows, hashes, len(prefix.pages), 1)
        self._windows.eviction_policy.note_probation(new_windows[new_windows > 0].astype(np.int64))
        made = replace(self._named(path, hashes), num_shared=prefix.num_shared)
        if len(prefix.pages) < prefix.num_shared <= len(path):
            self.keep(self._named(path[: prefix.num_shared], hashes))
        is_held = self._windows.ref_count[made.window_pages] > 0
        self._windows.touch(made.window_pages[~is_held])
        self._windows.ref_count[made.window_pages[is_held]] += 1  # no hit: what was on probation stays there
        self._windows.free_blocks(np.concatenate([prefix.window_pages, own_windows])[::-1])
        return made

    def keep(self, prefix: CachedPrefix) -> None:
        """Its window pages are on probation no more, nor one before them, which the same prompt needs again."""
        windows = self._allocator.window_pages(prefix.pages[-self._num_needed - 1 :], self._rank)
        self._windows.eviction_policy.note_lasting(windows[windows > 0].astype(np.int64))

    def evict(self, num_pages: int, num_window_pages: int) -> tuple[int, int]:
        """A page that is evicted takes its window page along."""
        pages = evict_pages(self._full, num_pages)
        windows = self._allocator.window_pages(pages, self._rank)
        windows = windows[windows > 0]
        self._allocator.unmap(pages, self._rank)
        self._windows.evict_blocks(windows)
        refresh(self._windows, windows)
        more = evict_pages(self._windows, num_window_pages - len(windows))
        self._allocator.unmap(self._allocator.owners(more, self._rank), self._rank)
        return len(pages), len(windows) + len(more)

    def pools(self) -> tuple[BlockPool, ...]:
        """All tokens' and the windows'."""
        return self._full, self._windows

    def _named(self, pages: np.ndarray, hashes: Sequence[BlockHash]) -> CachedPrefix:
        windows = self._allocator.window_pages(pages[-self._num_needed :], self._rank)
        return CachedPrefix(self._rank, hashes[: len(pages)], pages, windows)


def refresh(pool: BlockPool, pages: np.ndarray) -> None:
    """Free pages become the last to be evicted, the first of them last; those without a hash the first to be taken."""
    pool.touch(pages)
    pool.free_blocks(pages[::-1])


def check_cached(pool: BlockPool, pages: np.ndarray, hashes: Sequence[BlockHash], group_id: int) -> None:
    """Raises BlockStateError unless each page is cached under its hash."""
    place = pool.prefix_index.first_other(pages, list(hashes), group_id)
    if place is not None:
        raise BlockStateError(f"page {pages[place]} was evicted since its prefix was matched; match the prefix again")


def cache_pages(
    pool: BlockPool, held: np.ndarray, own: np.ndarray, hashes: Sequence[BlockHash], tokens: CachedTokens
) -> tuple[np.ndarray, np.ndarray]:  # int32[n], bool[len(own)]
    """The pages of all hashes, `held` first, with one reference each; and which were cached before."""
    found = pool.find_each(hashes[len(held) :], 0)
    was_known = found >= 0
    pool.cache_full_blocks(tokens, np.where(was_known, 0, own), hashes, len(held), 0)
    pool.touch(found[was_known])
    pool.free_blocks(own[was_known][::-1])
    return np.concatenate([held, np.where(was_known, found, own)]).astype(np.int32), was_known


def evict_pages(pool: BlockPool, num_pages: int) -> np.ndarray:  # int32[k]
    """The first `num_pages` cached pages in eviction order, or all of them, after they were made free ones."""
    count = max(0, min(num_pages, pool.num_cached_free_blocks))
    num_free = pool.num_free_blocks - pool.num_cached_free_blocks
    taken = take_in_order(pool, num_free + count) if count else _no_pages()
    pool.free_blocks(taken)
    return taken[num_free:]
