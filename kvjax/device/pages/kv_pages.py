"""The page arrays of a deployment as one pytree: pools -> columns -> arrays, all with pages leading.

Flow:    KVCacheConfig + Placement -> [create_pages] -> KVPages -> update step (donated) -> KVPages
Source:  ARCHITECTURE.md, "Page arrays"

Invariants:

    I1  page 0 of every data rank is zero for ever: nothing in this package writes it
    I2  a KVPages passed to a function that donates it is gone; only the returned one is alive
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kvjax.core.spec import KVCacheConfig
from kvjax.device.mesh.placement import Placement
from pallas_kernels.layouts import ArrayLayout, PageLayout

Column = tuple[jax.Array, ...]  # (k, v) split or (kv,) packed; each [num_blocks, *page_shape]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """All page arrays: `pools[pool_id][column]` is one layer's tuple of arrays."""

    pools: tuple[tuple[Column, ...], ...]
    # As `pools`, known while tracing too: kernels run once per device on its part of the arrays.
    shardings: tuple[tuple[tuple[NamedSharding, ...], ...], ...] = field(metadata={"static": True})

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays over all devices that split them, padding included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def num_pages(self, pool_id: int) -> int:
        """Pages of one pool on one data rank, the null page included."""
        return int(self.pools[pool_id][0][0].shape[0]) // self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Data ranks, whose pages lie one after another in every array."""
        sharding = self.shardings[0][0][0]
        return 1 if sharding.spec[0] is None else int(sharding.mesh.shape[sharding.spec[0]])

    def column(self, pool_id: int, column: int) -> Column:
        """Arrays of one column of one pool."""
        return self.pools[pool_id][column]

    def with_column(self, pool_id: int, column: int, arrays: Column) -> KVPages:
        """The same pages but for one column."""
        columns = self.pools[pool_id]
        return self.with_pool(pool_id, (*columns[:column], arrays, *columns[column + 1 :]))

    def with_pool(self, pool_id: int, columns: tuple[Column, ...]) -> KVPages:
        """The same pages but for one pool."""
        return replace(self, pools=(*self.pools[:pool_id], columns, *self.pools[pool_id + 1 :]))


def check_columns(kv_cache_config: KVCacheConfig, placement: Placement) -> None:
    """Raises ValueError unless every layer has a column of its own layout that splits over the placement.

    Raises NotImplementedError where pools share slabs: each would have arrays as large as the memory.
    """
    if kv_cache_config.slabs is not None:
        raise NotImplementedError(
            f"expected pools with arrays of their own, got {kv_cache_config.slabs}; plan with one_memory=False"
        )
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
    return KVPages(pools, pools)  # type: ignore[arg-type]


def page_shapes(kv_cache_config: KVCacheConfig, placement: Placement) -> KVPages:
    """A KVPages whose leaves are the ShapeDtypeStruct of each array, to compile for devices that are not here."""
    shardings = page_shardings(kv_cache_config, placement)

    def shape(array: ArrayLayout, num_blocks: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        shape = array.shape(num_blocks * placement.num_data)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=sharding)

    pools = tuple(
        tuple(
            tuple(shape(array, pool.num_blocks, to) for array, to in zip(layout.arrays, column, strict=True))
            for layout, column in zip(pool.columns, columns, strict=True)
        )
        for pool, columns in zip(kv_cache_config.pools, shardings.shardings, strict=True)
    )
    return KVPages(pools, shardings.shardings)  # type: ignore[arg-type]


def create_pages(kv_cache_config: KVCacheConfig, placement: Placement | None = None) -> KVPages:
    """Zero pages of every pool, made on the devices that hold them: no host copy, no device holds another's part.

    Raises:
        ValueError: a pool lacks columns, a column's layout is not its layer's, or KV heads do not split evenly.
        NotImplementedError: pools share slabs.
    """
    placement = Placement.create() if placement is None else placement
    check_columns(kv_cache_config, placement)
    shapes = page_shapes(kv_cache_config, placement)

    def zeros() -> KVPages:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=page_shardings(kv_cache_config, placement))()
