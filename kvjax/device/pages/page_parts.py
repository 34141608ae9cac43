"""Pages between devices and a host that keeps them: whole in one process, in parts where several share them.

Flow:    KVPages + a rank's page ids -> [gather] -> arrays to copy to the host;
         host bytes of those arrays -> [put] -> values -> `scatter_rank_pages`
Source:  shardings of kvjax.device.mesh.placement; multi-controller JAX: every process dispatches the same programs

A part is what a device holds of a page of one array. Devices that hold the same are one part, so each byte is kept once
in a process; a process without devices of the rank has no part. The programs run on all devices: which pages they move
every process decides alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import Column, KVPages
from kvjax.device.pages.rank_pages import RankStaging, gather_for_ranks, gather_rank_pages, num_ranks_of

Bounds = tuple[tuple[int, int], ...]  # first and end in each dimension


class PagePart(NamedTuple):
    """What some devices of one process hold of a page of one array."""

    bounds: Bounds
    devices: tuple[jax.Device, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part of a page."""
        return tuple(end - first for first, end in self.bounds)


class PageParts(Protocol):
    """What of a pool's pages a host keeps, as a list of arrays."""

    def gather(self, pages: KVPages, pool_id: int, rank: int, page_ids: np.ndarray) -> list[jax.Array]:
        """Copies of a rank's pages: arrays [padded count, ...], columns in order. Runs on all devices."""

    def put(self, staged: Sequence[np.ndarray], count: int, shapes: Any, shardings: Any, rank: int) -> Any:
        """Bytes of those arrays, as `scatter_rank_pages` takes them. Any thread may call it.

        Args:
            staged: uint8[count, bytes] of each array that `gather` gives.
            count: pages, padded.
            shapes: tree of a pool's ShapeDtypeStructs, of one page.
            shardings: likewise its NamedShardings.
            rank: whose pages they are.
        """


class WholePages:
    """Pages of one process: each array whole, whatever the devices that split it. Keeps zeros for other ranks."""

    def __init__(self) -> None:
        self._staging = RankStaging()

    def gather(self, pages: KVPages, pool_id: int, rank: int, page_ids: np.ndarray) -> list[jax.Array]:
        """[padded count, *page_shape] of each array.

        Raises:
            ValueError: as `gather_pages`.
        """
        return jax.tree.leaves(gather_rank_pages(pages, pool_id, rank, page_ids))

    def put(
        self, staged: Sequence[np.ndarray], count: int, shapes: Any, shardings: Any, rank: int
    ) -> tuple[Column, ...]:
        """As `PageParts.put`."""
        leaves, tree = jax.tree.flatten(shapes)
        arrays = [page.view(leaf.dtype).reshape(count, *leaf.shape) for page, leaf in zip(staged, leaves, strict=True)]
        return self._staging.put(jax.tree.unflatten(tree, arrays), shardings, rank)


class OwnParts:
    """The parts of pages on this process's devices, of each array in the order of their bounds."""

    def __init__(self) -> None:
        self._process = jax.process_index()
        self._staging = RankStaging()

    def gather(self, pages: KVPages, pool_id: int, rank: int, page_ids: np.ndarray) -> list[jax.Array]:
        """[padded count, *part.shape] of each part, on one device.

        Raises:
            ValueError: as `gather_pages`.
        """
        values = jax.tree.leaves(gather_for_ranks(pages, pool_id, rank, page_ids))
        found: list[jax.Array] = []
        for array, sharding in zip(values, jax.tree.leaves(pages.shardings[pool_id]), strict=True):
            by_device = {shard.device: shard.data for shard in array.addressable_shards}
            parts = parts_of(sharding, array.shape[1:], rank, self._process)
            found.extend(by_device[part.devices[0]] for part in parts)
        return found

    def put(
        self, staged: Sequence[np.ndarray], count: int, shapes: Any, shardings: Any, rank: int
    ) -> tuple[Column, ...]:
        """As `PageParts.put`; the other processes put theirs."""
        left = iter(staged)

        def one(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
            return self._put_array(left, count, shape, sharding, rank)

        return jax.tree.map(one, shapes, shardings)

    def _put_array(
        self, left: Iterator[np.ndarray], count: int, shape: jax.ShapeDtypeStruct, sharding: NamedSharding, rank: int
    ) -> jax.Array:
        own: dict[jax.Device, jax.Array] = {}
        for part in parts_of(sharding, shape.shape, rank, self._process):
            rows = next(left).view(shape.dtype).reshape(count, *part.shape)
            own.update((device, jax.device_put(rows, device)) for device in part.devices)
        whole = (count * num_ranks_of(sharding), *shape.shape)
        return self._staging.among_ranks(own, whole, shape.dtype, sharding)


@lru_cache
def parts_of(
    sharding: NamedSharding, page_shape: tuple[int, ...], rank: int, process: int
) -> tuple[PagePart, ...]:  # in the order of their bounds
    """The parts of a data rank's pages on the devices of a process."""
    shape = (num_ranks_of(sharding), *page_shape)
    by_bounds: dict[Bounds, list[Any]] = {}
    places: dict[Any, tuple[slice, ...]] = dict(sharding.devices_indices_map(shape))
    for device, index in places.items():
        (row, _), *bounds = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if device.process_index == process and row == rank:
            by_bounds.setdefault(tuple(bounds), []).append(device)
    return tuple(PagePart(bounds, tuple(by_bounds[bounds])) for bounds in sorted(by_bounds))


def alike_ranks(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Data ranks in groups whose pages lie alike over the processes: what one has computed any of them can take."""
    mesh = placement.mesh
    axis = None if placement.data_axis is None else mesh.axis_names.index(placement.data_axis)
    groups: dict[frozenset[Any], list[int]] = {}
    for rank in range(placement.num_data):
        devices = mesh.devices if axis is None else mesh.devices.take(rank, axis=axis)
        where = frozenset((device.process_index, place) for place, device in np.ndenumerate(devices))
        groups.setdefault(where, []).append(rank)
    return tuple(map(tuple, groups.values()))


__all__ = ["OwnParts", "PagePart", "PageParts", "WholePages", "alike_ranks", "parts_of"]
