"""Entries of one layer read out of its pages and written into them, on the devices that hold them.

Flow:    KVPages + page ids -> [read_entries] -> entries, heads split as in the pages;
         entries + places -> [write_entries] -> KVPages, donated
Source:  ARCHITECTURE.md, "Page arrays": ids of -1 are padding, page 0 stays zero

Lengths of id lists are powers of two, so that few programs are compiled.

Entries lie in the order of the tokens, on every context rank. There rank r of R has of a page the tokens t with
`t % R == r`: it reads them and gathers those of the others, and writes them alone. Page ids are a data rank's own, and
-1 on the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kvjax.core.spec import KVCacheConfig
from kvjax.device.mesh.placement import Placement, per_device
from kvjax.device.pages.kv_pages import Column, KVPages
from kvjax.device.pages.rank_pages import ids_among_ranks
from kvjax.transfer.entries import Arrays, pack_entries, unpack_pages
from pallas_kernels import page_ops
from pallas_kernels.layouts import HEAD_AXIS, TOKEN_AXIS, ArrayLayout, PageLayout
from pallas_kernels.slab_pages import replaced


@dataclass(frozen=True)
class LayerPages:
    """One layer of a deployment: where its pages are, and what an entry of them is. Immutable and hashable."""

    name: str
    group_id: int
    pool_id: int
    column: int
    layout: PageLayout
    entry_shapes: tuple[tuple[int, ...], ...]  # of whole entries, all heads; recurrent: of the state's arrays
    placement: Placement

    @property
    def has_heads(self) -> bool:
        """Whether the first dimension of an entry is split over shards."""
        return any(HEAD_AXIS in array.axes for array in self.layout.arrays)

    @property
    def num_shards(self) -> int:
        """Parts that the heads are split into."""
        return self.placement.num_shards

    @property
    def num_context(self) -> int:
        """Ranks that share the entries of a page."""
        return 1 if self.layout.kind == "recurrent" else self.placement.num_context

    @property
    def local_layout(self) -> PageLayout:
        """What one device holds of the entries of a page; with the heads of all."""

        def own(array: ArrayLayout) -> ArrayLayout:
            sizes = zip(array.axes, array.page_shape, strict=True)
            shape = tuple(size // self.num_context if axis == TOKEN_AXIS else size for axis, size in sizes)
            return replace(array, page_shape=shape)

        arrays = tuple(map(own, self.layout.arrays))
        return replace(self.layout, page_size=self.layout.page_size // self.num_context, arrays=arrays)

    @property
    def entries_per_page(self) -> int:
        """Tokens, vectors or states of a page."""
        return self.layout.page_size

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each array of entries."""
        arrays = self.layout.arrays
        return (
            tuple(array.dtype for array in arrays) if len(arrays) > 1 else (arrays[0].dtype,) * len(self.entry_shapes)
        )

    @property
    def local_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`entry_shapes` on one device."""
        if not self.has_heads:
            return self.entry_shapes
        return tuple((shape[0] // self.num_shards, *shape[1:]) for shape in self.entry_shapes)

    @property
    def entry_specs(self) -> tuple[PartitionSpec, ...]:
        """PartitionSpec of each array of entries [n, *entry_shape]."""
        spec = PartitionSpec(None, self.placement.head_axis) if self.has_heads else PartitionSpec()
        return (spec,) * len(self.entry_shapes)

    @property
    def rank_specs(self) -> tuple[PartitionSpec, ...]:
        """PartitionSpec of each array of all data ranks' entries [ranks * n, *entry_shape]."""
        return tuple(PartitionSpec(self.placement.data_axis, *spec[1:]) for spec in self.entry_specs)

    def in_token_order(self, own: jax.Array) -> jax.Array:
        """Entries [n, ...] of all context ranks, of which this has `own`."""
        if self.num_context == 1:
            return own
        return lax.all_gather(own, self.placement.token_axis, axis=1).reshape(-1, *own.shape[1:])

    def own_places(self, places: jax.Array) -> jax.Array:
        """This context rank's places among int32[n] places of entries in the order of the tokens."""
        if self.num_context == 1:
            return places
        return places.reshape(-1, self.num_context)[:, lax.axis_index(self.placement.token_axis)]


def layers_of(kv_cache_config: KVCacheConfig, placement: Placement) -> tuple[LayerPages, ...]:
    """Every layer that has pages, by group and column.

    Raises:
        NotImplementedError: states are cached apart; a request is sent where it ends, and idle states end with blocks.
    """
    if kv_cache_config.idle_groups:
        raise NotImplementedError("requests with idle states cannot be sent; plan without idle_state_dtype")
    layers = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for column, name in enumerate(group.layer_names):
            layout = kv_cache_config.pools[group.pool_id].columns[column]
            spec = group.spec_of(column)
            shapes = spec.entry_shapes or tuple(array.page_shape for array in spec.page_layout("cpu").arrays)
            layers.append(LayerPages(name, group_id, group.pool_id, column, layout, shapes, placement))
    return tuple(layers)


def padded_ids(page_ids: np.ndarray, rank: int = 0, num_ranks: int = 1) -> np.ndarray:
    """int32[num_ranks, n] page ids of a data rank, filled with -1 up to a power of two, and -1 of the other ranks."""
    length = padded_length(page_ids.size)
    return ids_among_ranks(page_ids, rank, num_ranks, (length,)).reshape(num_ranks, length)


def padded_length(num_pages: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(num_pages - 1, 0).bit_length()


@partial(jax.jit, static_argnums=1)
def read_entries(
    pages: KVPages,
    layers: tuple[LayerPages, ...],  # of one pool
    page_ids: jax.Array,  # int32[ranks, n] -1: zeros
) -> tuple[Arrays, ...]:
    """For each layer its entries [ranks * n * entries_per_page, *entry_shape] in the order of the pages."""

    def read_layer(layer: LayerPages, column: Column, page_ids: jax.Array) -> Arrays:
        gathered = tuple(page_ops.gather_pages(array, page_ids) for array in column)
        return tuple(map(layer.in_token_order, unpack_pages(layer.local_layout, layer.local_shapes, gathered)))

    def read(columns: tuple[Column, ...], page_ids: jax.Array) -> tuple[Arrays, ...]:
        return tuple(read_layer(layer, column, page_ids[0]) for layer, column in zip(layers, columns, strict=True))

    columns, specs, mesh = _columns(pages, layers)
    outputs = tuple(layer.rank_specs for layer in layers)
    return per_device(read, mesh, (specs, layers[0].placement.by_rank), outputs)(columns, page_ids)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def write_entries(
    pages: KVPages,
    layers: tuple[LayerPages, ...],  # of one pool
    entries: tuple[Arrays, ...],  # [k, *entry_shape] of each layer
    page_ids: jax.Array,  # int32[ranks, n] -1: skip
    places: jax.Array,  # int32[n * entries_per_page] among the k entries; -1: zero
) -> KVPages:
    """Pages with the entries in their places; every entry of a page that is named is written."""

    def write(
        columns: tuple[Column, ...], entries: tuple[Arrays, ...], page_ids: jax.Array, places: jax.Array
    ) -> tuple[Column, ...]:
        return tuple(
            _written(layer, column, arrays, page_ids[0], layer.own_places(places))
            for layer, column, arrays in zip(layers, columns, entries, strict=True)
        )

    columns, specs, mesh = _columns(pages, layers)
    inputs = (specs, tuple(layer.entry_specs for layer in layers), layers[0].placement.by_rank, PartitionSpec())
    written = per_device(write, mesh, inputs, specs)(columns, entries, page_ids, places)
    for layer, column in zip(layers, written, strict=True):
        pages = pages.with_column(layer.pool_id, layer.column, column)
    return pages


def _written(layer: LayerPages, column: Column, arrays: Arrays, page_ids: jax.Array, places: jax.Array) -> Column:
    """One layer's page arrays, on one device."""
    taken = jnp.where(places < 0, arrays[0].shape[0], places)  # out of range: filled
    placed = tuple(jnp.take(array, taken, axis=0, mode="fill", fill_value=0) for array in arrays)
    shapes = tuple(array.shape[1:] for array in column)
    packed = pack_entries(layer.local_layout, shapes, placed)
    for i, values in enumerate(packed):
        column = replaced(column, i, page_ops.scatter_pages(column[i], page_ids, values))
    return column


def _columns(
    pages: KVPages, layers: tuple[LayerPages, ...]
) -> tuple[tuple[Column, ...], tuple[Any, ...], Mesh | AbstractMesh]:
    columns = tuple(pages.column(layer.pool_id, layer.column) for layer in layers)
    specs = tuple(pages.specs(layer.pool_id, layer.column) for layer in layers)
    return columns, specs, pages.shardings[0][0][0].mesh
