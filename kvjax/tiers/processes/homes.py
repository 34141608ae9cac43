"""Which data ranks share tiers where several processes have parts of their pages, and what each process has.

Flow:    KVCacheConfig, Placement -> [homes_of] -> Home -> ProcessTiers
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax

from kvjax.core.spec import KVCacheConfig
from kvjax.device import Placement
from kvjax.device.pages.kv_pages import array_shapes
from kvjax.device.pages.page_parts import PagePart, alike_ranks, parts_of
from kvjax.tiers.units import UnitSizes


@dataclass(frozen=True)
class Home:
    """Data ranks that share tiers, and what each process has of one of their units."""

    ranks: tuple[int, ...]
    processes: tuple[int, ...]  # that have parts
    sizes: dict[int, UnitSizes]  # of each of them
    places: dict[int, str]  # likewise: which parts, as text

    @classmethod
    def of(cls, ranks: tuple[int, ...], kv_cache_config: KVCacheConfig, placement: Placement) -> Home:
        """The home of some ranks, whose pages lie alike."""
        pools = array_shapes(kv_cache_config, placement)
        sizes, places = {}, {}
        for process in sorted({device.process_index for device in placement.mesh.devices.flat}):
            found = [
                [[parts_of(x.sharding, x.shape[1:], ranks[0], process) for x in column] for column in columns]
                for columns in pools
            ]

            def part_bytes(pool_id: int, column: int, array: int, found: Any = found) -> list[int]:
                itemsize = pools[pool_id][column][array].dtype.itemsize
                return [math.prod(part.shape) * itemsize for part in found[pool_id][column][array]]

            of_process = UnitSizes.of_parts(kv_cache_config, part_bytes)
            if any(map(len, of_process.arrays_of_pool)):
                sizes[process] = of_process
                places[process] = repr(jax.tree.map(lambda part: part.bounds, found, is_leaf=_is_part))
        return cls(ranks, tuple(sizes), sizes, places)

    @property
    def bytes_of_group(self) -> tuple[int, ...]:
        """Bytes of one unit of each group, in the process that has most of it."""
        return tuple(map(max, zip(*(sizes.bytes_of_group for sizes in self.sizes.values()), strict=True)))

    def sizes_in(self, process: int) -> UnitSizes:
        """Own parts' sizes, counted as those of the process that has most; without parts where a process has none."""
        any_sizes = next(iter(self.sizes.values()))
        nothing = UnitSizes(
            pool_of_group=any_sizes.pool_of_group,
            arrays_of_pool=tuple(() for _ in any_sizes.arrays_of_pool),
            num_arrays_of_group=(0,) * len(any_sizes.pool_of_group),
            bytes_of_group=self.bytes_of_group,
        )
        own = self.sizes.get(process, nothing)
        return replace(own, bytes_of_group=self.bytes_of_group)

    def share_of(self, num_bytes: int, homes_of: Counter[int]) -> int:
        """This home's share of `num_bytes` of each process, which its homes divide evenly."""
        return num_bytes // max(homes_of[process] for process in self.processes)


def homes_of(kv_cache_config: KVCacheConfig, placement: Placement) -> list[Home]:
    """The homes of all data ranks."""
    return [Home.of(ranks, kv_cache_config, placement) for ranks in alike_ranks(placement)]


def _is_part(value: Any) -> bool:
    return isinstance(value, PagePart)


__all__ = ["Home", "homes_of"]
