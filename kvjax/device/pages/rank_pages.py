"""Pages of one data rank among those of all: read, written and brought from the host by the devices of that rank.

Flow:    KVPages + a rank's page ids -> [gather_rank_pages] -> pages on the rank's devices;
         host arrays -> [RankStaging] -> values -> [scatter_rank_pages] -> KVPages, donated
Source:  kvjax.device.pages.page_ops, whose padded functions take the ids of all ranks

The other ranks' devices run the same programs on ids of -1: they gather zeros and scatter nothing. What they gather is
dropped there, and what they are given are zeros that lie on them already, so only the rank's own bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import Column, KVPages
from kvjax.device.pages.page_ops import (
    PAGE_COUNTS,
    SKIP,
    check_page_ids,
    gather_pages_padded,
    pad_ids,
    scatter_pages_padded,
)


def gather_rank_pages(
    pages: KVPages,
    pool_id: int,
    rank: int,
    page_ids: np.ndarray,  # int32[n] of the rank
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> tuple[Column, ...]:
    """Copies of a rank's pages, per column a tuple of [count, *page_shape] on its devices; rows from n on are zero.

    Raises:
        ValueError: as `gather_pages`.
    """
    values, num_ranks = gather_for_ranks(pages, pool_id, rank, page_ids, page_counts), pages.num_ranks
    return values if num_ranks == 1 else jax.tree.map(lambda array: part_of_rank(array, rank, num_ranks), values)


@hands_over
def gather_for_ranks(
    pages: KVPages, pool_id: int, rank: int, page_ids: np.ndarray, page_counts: Sequence[int] = PAGE_COUNTS
) -> tuple[Column, ...]:
    """As `gather_rank_pages`, [ranks * count, *page_shape] on all devices, as `scatter_rank_pages` takes them."""
    check_page_ids(page_ids, pages.num_pages(pool_id), lowest=0)
    return gather_pages_padded(pages, pool_id, ids_among_ranks(page_ids, rank, pages.num_ranks, page_counts))


@hands_over
def scatter_rank_pages(
    pages: KVPages,
    pool_id: int,
    rank: int,
    page_ids: np.ndarray,  # int32[n] of the rank
    values: tuple[Column, ...],  # [ranks * count, *page_shape]
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> KVPages:
    """Writes a rank's pages.

    Raises:
        ValueError: an id is outside the pool or null, or there are too many. The pages are untouched.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id))
    ids = ids_among_ranks(page_ids, rank, pages.num_ranks, page_counts)
    return scatter_pages_padded(pages, pool_id, ids, values)


class RankStaging:
    """Puts host arrays of one rank where `scatter_rank_pages` takes them. Any thread may call it.

    It keeps zeros for the other ranks: on each device an array of every shape that it was asked for.
    """

    def __init__(self) -> None:
        self._zeros: dict[tuple[Any, ...], jax.Array] = {}

    def put(self, arrays: Any, shardings: Any, rank: int) -> Any:
        """A tree of host arrays [count, *page_shape] as [ranks * count, *page_shape], zero but for the rank's rows.

        Args:
            arrays: of the rank.
            shardings: NamedSharding of each page array.
            rank: whose they are.
        """
        if num_ranks_of(jax.tree.leaves(shardings)[0]) == 1:
            return jax.device_put(arrays, shardings)
        own = jax.device_put(arrays, jax.tree.map(lambda sharding: sharding_of_rank(sharding, rank), shardings))

        def among_ranks(array: jax.Array, sharding: NamedSharding) -> jax.Array:
            shape = (array.shape[0] * num_ranks_of(sharding), *array.shape[1:])
            parts = {shard.device: shard.data for shard in array.addressable_shards}
            return self.among_ranks(parts, shape, array.dtype, sharding)

        return jax.tree.map(among_ranks, own, shardings)

    def among_ranks(
        self, parts: dict[jax.Device, jax.Array], shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
    ) -> jax.Array:
        """An array of all ranks made of what some devices of this process hold; `parts` gets zeros for the others."""
        local = sharding.shard_shape(shape)
        for device in sharding.addressable_devices - parts.keys():
            parts[device] = self._zeros_on(device, local, dtype)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts.values()))

    def _zeros_on(self, device: jax.Device, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = (device, shape, dtype)
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._zeros[key]


def ids_among_ranks(
    page_ids: np.ndarray, rank: int, num_ranks: int, page_counts: Sequence[int] = PAGE_COUNTS
) -> np.ndarray:  # int32[num_ranks * count]
    """A rank's page ids, padded, in its place among those of all ranks, which have none.

    Raises:
        ValueError: there are more ids than the largest length.
    """
    own = pad_ids(page_ids, page_counts)
    if num_ranks == 1:
        return own
    ids = np.full((num_ranks, own.size), SKIP, np.int32)
    ids[rank] = own
    return ids.reshape(-1)


def part_of_rank(array: jax.Array, rank: int, num_ranks: int) -> jax.Array:
    """The rows of one rank, on its devices; without a copy. A process may have none of them."""
    if num_ranks == 1:
        return array
    assert isinstance(array.sharding, NamedSharding)
    num_rows = array.shape[0] // num_ranks
    own = [shard.data for shard in array.addressable_shards if (shard.index[0].start or 0) == rank * num_rows]
    shape = (num_rows, *array.shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, sharding_of_rank(array.sharding, rank), own, dtype=array.dtype
    )


def num_ranks_of(sharding: NamedSharding) -> int:
    """Data ranks that split the pages of an array."""
    axis = sharding.spec[0] if len(sharding.spec) else None
    return 1 if axis is None else int(sharding.mesh.shape[axis])


@lru_cache
def sharding_of_rank(sharding: NamedSharding, rank: int) -> NamedSharding:
    """How one rank's rows of an array lie on the rank's devices."""
    mesh, axis = sharding.mesh, sharding.spec[0]
    assert isinstance(mesh, Mesh)
    devices = mesh.devices.take([rank], axis=mesh.axis_names.index(axis))
    own = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(own, PartitionSpec(None, *sharding.spec[1:]))


__all__ = [
    "RankStaging",
    "gather_for_ranks",
    "gather_rank_pages",
    "ids_among_ranks",
    "num_ranks_of",
    "part_of_rank",
    "scatter_rank_pages",
    "sharding_of_rank",
]
