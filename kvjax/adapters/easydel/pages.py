"""Pages as EasyDeL's scheduler reads them, over the blocks of kvjax's pools.

Flow:    kvjax.core.KVCacheBlocks of a shard -> [CachePages] -> EasyDeL's Scheduler, and back into `allocate_slots`
Source:  CachePages of EasyDeL 0.3.0, easydel/inference/esurge/core/manager.py; CachePage of its utils.py

With data parallelism the ids [s * n, (s + 1) * n) are those of shard s, and the null page is page 0 of shard 0. Every
shard has a pool of its own here, whose null block stands for page 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvjax.core.pool.block import KVCacheBlock
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks


@dataclass(frozen=True)
class CachePage:
    """A view of one page."""

    page_id: int
    block: KVCacheBlock

    @property
    def ref_cnt(self) -> int:
        """Requests that hold it."""
        return self.block.ref_cnt

    @property
    def page_hash(self) -> Any:
        """What it caches; None: nothing."""
        return self.block.block_hash

    @property
    def is_null(self) -> bool:
        """Whether it is page 0, which stands for one that is not needed."""
        return self.block.is_null


@dataclass(frozen=True)
class CachePages:
    """Pages of every group, in table order."""

    pages: tuple[list[CachePage], ...]

    def __add__(self, other: CachePages) -> CachePages:
        return CachePages(tuple(a + b for a, b in zip(self.pages, other.pages, strict=True)))

    def get_page_ids(self) -> tuple[list[int], ...]:
        """Ids per group."""
        return tuple([page.page_id for page in group] for group in self.pages)

    def get_unhashed_page_ids(self) -> list[int]:
        """Ids of pages that cache nothing.

        Raises:
            ValueError: there is not exactly one group.
        """
        (group,) = self.pages
        return [page.page_id for page in group if page.page_hash is None]

    def new_empty(self) -> CachePages:
        """No pages of as many groups."""
        return CachePages(tuple([] for _ in self.pages))


@dataclass(frozen=True)
class ShardPages:
    """Which page ids the blocks of one shard's pool are."""

    shard: int
    pages_per_shard: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the shard's pool, the null block included; shard 0 has page 0 as that."""
        return self.pages_per_shard + (self.shard > 0)

    @property
    def _offset(self) -> int:
        return self.shard * self.pages_per_shard - (self.shard > 0)

    def pages(self, blocks: KVCacheBlocks) -> CachePages:
        """The blocks under their page ids."""
        return CachePages(
            tuple(
                [CachePage(b.block_id + self._offset if b.block_id else 0, b) for b in group] for group in blocks.blocks
            )
        )

    def has(self, page_id: int) -> bool:
        """Whether a page other than the null one is of this shard."""
        return page_id // self.pages_per_shard == self.shard

    def block_ids(self, page_ids: tuple[list[int], ...]) -> list[list[int]]:
        """The shard's blocks of its pages and of the null page."""
        return [[page_id - self._offset if page_id else 0 for page_id in group] for group in page_ids]
