"""The page arrays of a deployment as one pytree: pools -> columns -> arrays, all with pages leading.

Flow:    KVCacheConfig + Placement -> [create_pages] -> KVPages -> update step (donated) -> KVPages
Source:  ARCHITECTURE.md, "Page arrays", "Pages in slabs"

Invariants:

    I1  page 0 of every data rank is zero for ever: nothing in this package writes it
    I2  a KVPages passed to a function that donates it is gone; only the returned one is alive
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.core.spec import KVCacheConfig
from kvjax.device.mesh.placement import Placement
from pallas_kernels.layouts import ArrayLayout, PageLayout, slab_rows
from pallas_kernels.slab_pages import LANES, PlaceInSlab, SlabColumn, page_arrays, places_of

# (k, v) split or (kv,) packed; each [num_blocks, *page_shape]. In slabs a `SlabColumn`, which passes for such a tuple.
Column: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Slabs:
    """How the columns of a memory in slabs lie. Each is uint32[slabs, rows, 128] on every device."""

    places: tuple[tuple[tuple[PlaceInSlab, ...], ...], ...]  # as the pools' arrays; of one device
    sharding: NamedSharding  # of a column


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """All page arrays: `pools[pool_id][column]` is one layer's tuple of arrays."""

    arrays: tuple[Any, ...]  # what `pools` gives; where pools share slabs the columns of their memory
    # As `pools`, known while tracing too: kernels run once per device on its part of the arrays.
    shardings: tuple[tuple[tuple[NamedSharding, ...], ...], ...] = field(metadata={"static": True})
    slabs: Slabs | None = field(default=None, metadata={"static": True})

    @property
    def pools(self) -> tuple[tuple[Column, ...], ...]:
        """The arrays by pool and column."""
        if self.slabs is None:
            return self.arrays
        columns = [range(len(places)) for places in self.slabs.places]
        return tuple(tuple(self.column(pool_id, column) for column in own) for pool_id, own in enumerate(columns))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays over all devices that split them, padding included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def num_pages(self, pool_id: int) -> int:
        """Pages of one pool on one data rank, the null page included."""
        return int(self.column(pool_id, 0)[0].shape[0]) // self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Data ranks, whose pages lie one after another in every array."""
        sharding = self.shardings[0][0][0]
        return 1 if sharding.spec[0] is None else int(sharding.mesh.shape[sharding.spec[0]])

    def column(self, pool_id: int, column: int) -> Column:
        """Arrays of one column of one pool."""
        if self.slabs is None:
            arrays: Column = self.arrays[pool_id][column]
            return arrays
        return page_arrays(SlabColumn(self.arrays[column], self.slabs.places[pool_id][column]))

    def specs(self, pool_id: int, column: int) -> Any:
        """PartitionSpecs of what `column` gives, as `jax.shard_map` takes them."""
        if self.slabs is not None:
            return self.slabs.sharding.spec
        return tuple(sharding.spec for sharding in self.shardings[pool_id][column])

    def page_shapes(self, pool_id: int) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shape and dtype of one page of every array of a pool, over all devices that split it."""

        def one(array: jax.Array, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            shape = array.shape[1:]
            if self.slabs is not None:
                shape = tuple(size * _num_parts(sharding, 1 + dim) for dim, size in enumerate(shape))
            return jax.ShapeDtypeStruct(shape, array.dtype)

        return tuple(
            tuple(map(one, column, of_column))
            for column, of_column in zip(self.pools[pool_id], self.shardings[pool_id], strict=True)
        )

    def with_column(self, pool_id: int, column: int, arrays: Column) -> KVPages:
        """The same pages but for one column."""
        if isinstance(arrays, SlabColumn):
            return replace(self, arrays=_with(self.arrays, column, arrays.memory))
        columns = _with(self.arrays[pool_id], column, arrays)
        return replace(self, arrays=_with(self.arrays, pool_id, columns))

    def with_pool(self, pool_id: int, columns: tuple[Column, ...]) -> KVPages:
        """The same pages but for one pool."""
        pages = self
        for column, arrays in enumerate(columns):
            pages = pages.with_column(pool_id, column, arrays)
        return pages


def _with(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def _num_parts(sharding: NamedSharding, dim: int) -> int:
    axis = sharding.spec[dim] if dim < len(sharding.spec) else None
    return 1 if axis is None else int(sharding.mesh.shape[axis])


def check_columns(kv_cache_config: KVCacheConfig, placement: Placement) -> None:
    """Raises ValueError unless every layer has a column of its own layout that splits over the placement."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        columns = kv_cache_config.pools[group.pool_id].columns
        if len(columns) < len(group.layer_names):
            raise ValueError(
                f"group {group_id}: expected at least {len(group.layer_names)} columns in pool {group.pool_id}, "
                f"got {len(columns)}; plan the config with page layouts"
            )
        for place, (name, layout) in enumerate(zip(group.layer_names, columns, strict=False)):
            spec = group.spec_of(place)
            wanted = spec.page_layout(layout.platform, placement.num_shards)
            if layout != wanted:
                raise ValueError(f"layer {name!r}: expected pages of {wanted}, got {layout}")
            placement.check_heads(spec, layout)
            placement.check_tokens(spec, layout)
            placement.check_ranks(spec)


def page_shardings(kv_cache_config: KVCacheConfig, placement: Placement) -> KVPages:
    """A KVPages whose leaves are the NamedSharding of each array."""

    def column(layout: PageLayout) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(placement.mesh, placement.page_spec(array)) for array in layout.arrays)

    pools = tuple(tuple(column(layout) for layout in pool.columns) for pool in kv_cache_config.pools)
    slabs = _slabs(kv_cache_config, placement)
    if slabs is None:
        return KVPages(pools, pools)
    num_columns = max(map(len, slabs.places))
    return KVPages((slabs.sharding,) * num_columns, pools, slabs)


def array_shapes(kv_cache_config: KVCacheConfig, placement: Placement) -> tuple[tuple[Any, ...], ...]:
    """The ShapeDtypeStruct of each array of pages, by pool and column; in slabs of what `SlabArray` passes for."""

    def shape(array: ArrayLayout, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape, sharding = array.shape(num_blocks * placement.num_data), placement.page_spec(array)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=NamedSharding(placement.mesh, sharding))

    return tuple(
        tuple(tuple(shape(array, pool.num_blocks) for array in layout.arrays) for layout in pool.columns)
        for pool in kv_cache_config.pools
    )


def page_shapes(kv_cache_config: KVCacheConfig, placement: Placement) -> KVPages:
    """A KVPages whose leaves are the ShapeDtypeStruct of each array, to compile for devices that are not here."""
    pages = page_shardings(kv_cache_config, placement)
    if pages.slabs is None or kv_cache_config.slabs is None:
        return replace(pages, arrays=array_shapes(kv_cache_config, placement))
    places = [place for pool in pages.slabs.places for column in pool for place in column]
    filled = max(place.page_rows * place.blocks_per_slab for place in places)
    rows = slab_rows(filled, on_tpu=any(place.packs for place in places))
    shape = (kv_cache_config.slabs.num_slabs * placement.num_data, rows * _devices_of_page(placement), LANES)
    memory = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=pages.slabs.sharding)
    return replace(pages, arrays=(memory,) * len(pages.arrays))


def create_pages(kv_cache_config: KVCacheConfig, placement: Placement | None = None) -> KVPages:
    """Zero pages of every pool, made on the devices that hold them: no host copy, no device holds another's part.

    Raises:
        ValueError: a pool lacks columns, a column's layout is not its layer's, or KV heads do not split evenly.
    """
    placement = Placement.create() if placement is None else placement
    check_columns(kv_cache_config, placement)
    shapes = page_shapes(kv_cache_config, placement)

    def zeros() -> KVPages:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=page_shardings(kv_cache_config, placement))()


def _slabs(kv_cache_config: KVCacheConfig, placement: Placement) -> Slabs | None:
    """Where the pools' arrays lie in slabs, each device's part of a page in rows of its own; None: in arrays."""
    if kv_cache_config.slabs is None:
        return None
    # Layouts of many recurrent states are the same everywhere; those of tokens beside them tell a TPU's.
    packs = any(layout.platform == "tpu" for pool in kv_cache_config.pools for layout in pool.columns)
    places = tuple(
        tuple(_places(layout, placement, count, packs) for layout in pool.columns)
        for pool, count in zip(kv_cache_config.pools, kv_cache_config.slabs.blocks_per_slab, strict=True)
    )
    axes = tuple(axis for axis in (placement.head_axis, placement.token_axis) if axis is not None)
    spec = PartitionSpec(placement.data_axis, axes or None)
    return Slabs(places, NamedSharding(placement.mesh, spec))


def _places(layout: PageLayout, placement: Placement, blocks_per_slab: int, packs: bool) -> tuple[PlaceInSlab, ...]:
    """Of a device's part of each array."""

    def own(array: ArrayLayout) -> tuple[int, ...]:
        sharding = NamedSharding(placement.mesh, placement.page_spec(array))
        return tuple(size // _num_parts(sharding, 1 + dim) for dim, size in enumerate(array.page_shape))

    arrays = [(own(array), array.dtype) for array in layout.arrays]
    return places_of(arrays, blocks_per_slab, packs=packs)


def _devices_of_page(placement: Placement) -> int:
    """Devices that each have rows of a slab, of those of a data rank."""
    return placement.num_shards * placement.num_context
