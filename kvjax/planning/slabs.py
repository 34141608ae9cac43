"""One memory for pools of unlike pages: how large a slab is, how many layers an id has, and how many slabs there are.

Flow:    specs of all layers -> [common_columns] -> `planning.grouping`; CacheShape -> [SlabShape.of] -> SlabSpec

Layer i of every group lies in column i, and a slab is a stretch of each column. So all groups should have equally many
layers: as many as the pool with the fewest, by which groups of other pools are cut. A slab of a column is as many bytes
as waste least:

    rows of a slab = k * (rows of a page of some pool), from the largest page up to twice of it, on TPU whole tiles
    waste          = the share of a slab that whole blocks leave, weighed by the bytes of each pool that a load keeps

Of sizes that waste nearly as little, those come first that the smallest pages fill to the last row. Their pool has the
most pages, which kernels then find by their numbers alone: GPU kernels want pages that begin with whole blocks of
tokens, and a TPU's need no tables of rows. Of these the smallest comes first: it changes hands most easily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvjax.core.spec import KVCacheSpec, SlabSpec, cdiv
from kvjax.errors import MemoryBudgetError
from kvjax.planning.grouping import group_layers
from kvjax.planning.load import Load
from kvjax.planning.shape import CacheShape
from kvjax.planning.sizing import PoolNeed
from kvjax.planning.summary import KeptCache
from kvjax.text import format_bytes
from pallas_kernels.layouts import ROW_BYTES, slab_rows

TOLERATED = 0.01  # waste beyond the least


MOST_COUNTS = 10_000  # pages of a pool that slabs are tried with, beyond the least


@dataclass(frozen=True)
class SlabShape:
    """Slabs of a deployment on one device."""

    blocks_per_slab: tuple[int, ...]  # per pool
    bytes_per_slab: int  # of all columns
    waste: tuple[float, ...]  # per pool the share of a slab that its blocks leave

    @classmethod
    def of(cls, shape: CacheShape, needs: Sequence[PoolNeed]) -> SlabShape:
        """The slabs that waste least; `needs` of each pool say what a load keeps."""
        pages = [_page_rows(shape, pool_id) for pool_id in range(shape.num_pools)]
        largest, smallest = max(pages), min(pages)
        sizes = {
            slab_rows(count * page, on_tpu=shape.platform == "tpu")
            for page in pages
            for count in range(cdiv(largest, page), min(2 * largest // page, cdiv(largest, page) + MOST_COUNTS) + 1)
        }
        kept = [float(need.kept_blocks * need.bytes_per_block) for need in needs]
        wastes = {
            size: sum(weight * _waste(size, page) for weight, page in zip(kept, pages, strict=True)) / sum(kept)
            for size in sizes
        }
        good = [size for size, waste in wastes.items() if waste <= min(wastes.values()) + TOLERATED]
        best = min(good, key=lambda size: (size % smallest > 0, size))
        num_columns = max(len(group.group.layer_names) for group in shape.groups)
        return cls(
            tuple(best // page for page in pages),
            num_columns * best * ROW_BYTES,
            tuple(_waste(best, page) for page in pages),
        )

    def spec_of(self, num_slabs: int) -> SlabSpec:
        """So many slabs, the null slab included."""
        return SlabSpec(num_slabs, self.blocks_per_slab)

    def least_slabs(self, needs: Sequence[PoolNeed]) -> int:
        """For one request of the longest length, the null slab included."""
        return 1 + sum(cdiv(need.least_blocks - 1, k) for need, k in zip(needs, self.blocks_per_slab, strict=True))

    def slabs_of_budget(self, needs: Sequence[PoolNeed], memory_bytes: int) -> int:
        """As many as the budget holds, the null slab included.

        Raises:
            MemoryBudgetError: not even one request fits; says how many bytes are missing.
        """
        num_slabs, least = memory_bytes // self.bytes_per_slab, self.least_slabs(needs)
        if num_slabs < least:
            missing = least * self.bytes_per_slab - memory_bytes
            raise MemoryBudgetError(
                f"the cache of one request of the planned length needs {least} slabs of "
                f"{format_bytes(self.bytes_per_slab)}, got {memory_bytes:,} bytes ({format_bytes(memory_bytes)}): "
                f"{missing:,} bytes short; give more memory, plan for shorter requests, or take fewer tokens in flight"
            )
        return num_slabs

    def requests_that_fit(self, needs: Sequence[PoolNeed], num_slabs: int) -> float:
        """Resident requests of the usual length; 0 where tokens in flight fill the slabs."""
        fixed = sum(cdiv(n.fixed_blocks - 1, k) for n, k in zip(needs, self.blocks_per_slab, strict=True))
        return float(max(num_slabs - 1 - fixed, 0) / self._slabs_of([need.request_blocks for need in needs]))

    def kept(self, needs: Sequence[PoolNeed], num_slabs: int, load: Load) -> KeptCache:
        """What so many slabs keep while nothing runs, of requests as in `load`."""
        num_requests = (num_slabs - 1) / self._slabs_of([need.kept_blocks for need in needs])
        return KeptCache(int(num_requests * load.tokens_per_checkpoint), int(num_requests))

    def _slabs_of(self, blocks: Sequence[Fraction | int]) -> Fraction:
        """Slabs that so many blocks of each pool fill on average."""
        return sum((Fraction(b) / k for b, k in zip(blocks, self.blocks_per_slab, strict=True)), Fraction(0))


def common_columns(specs: Mapping[str, KVCacheSpec], platform: str, hybrid: bool) -> int | None:
    """Layers of each group where pools share a memory; None: there is one pool, or one of unlike layers.

    None too where all pools hold states: their layouts do not tell on which platform slabs are packed.
    """
    groups = group_layers(specs, platform=platform, hybrid=hybrid)
    if all(group.spec.state_pages is not None for group in groups):
        return None
    if len({group.pool_id for group in groups}) == 1:
        return None
    if any(len({spec.page_layout(platform) for spec in group.layer_specs}) > 1 for group in groups):
        return None
    num_layers: dict[int, int] = {}
    for group in groups:
        num_layers[group.pool_id] = num_layers.get(group.pool_id, 0) + len(group.layer_names)
    return min(num_layers.values())


def _page_rows(shape: CacheShape, pool_id: int) -> int:
    """Rows of 128 words of a page of one column."""
    return max(part.rows for group in shape.pool_groups(pool_id) for part in group.pages)


def _waste(slab: int, page: int) -> float:
    return slab % page / slab


__all__ = ["SlabShape", "common_columns"]
