"""Pages: zeros in the shapes of the config's columns, on the devices of the placement."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, SlabSpec
from kvjax.device import create_pages
from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import page_shapes, page_shardings
from tests.device.toy import toy_config


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_pages_are_zeros_of_the_planned_bytes(platform: str, dtype: str) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype=dtype)
    pools = (KVCachePoolSpec(5, (spec.page_layout(platform),) * 2), KVCachePoolSpec(3, (spec.page_layout(platform),)))
    groups = (KVCacheGroupSpec(("a", "b"), spec, 0), KVCacheGroupSpec(("c",), spec, 1))
    pages = create_pages(KVCacheConfig(pools, groups))
    assert [len(pool) for pool in pages.pools] == [2, 1]
    assert [pages.num_pages(i) for i in range(2)] == [5, 3]
    assert pages.num_bytes == sum(pool.num_blocks * pool.bytes_per_block for pool in pools)
    for leaf in jax.tree.leaves(pages):
        assert leaf.dtype == jax.numpy.dtype(dtype)
        assert not np.asarray(leaf, np.float32).any()


def test_a_column_or_pool_can_be_exchanged_alone() -> None:
    pages = create_pages(toy_config(num_blocks=3))
    ones = tuple(leaf + 1 for leaf in pages.column(0, 1))
    changed = pages.with_column(0, 1, ones)
    assert changed.column(0, 0) is pages.column(0, 0)
    assert changed.column(0, 1) is ones
    assert jax.tree.structure(changed) == jax.tree.structure(pages)
    assert changed.with_pool(0, pages.pools[0]).column(0, 1) is pages.column(0, 1)


def test_shardings_split_the_head_axis_only() -> None:
    for platform, spec in (("cpu", (None, None, "tensor", None)), ("tpu", (None, None, "tensor", None, None))):
        shardings = page_shardings(toy_config(platform=platform), Placement.create())
        assert {leaf.spec for leaf in jax.tree.leaves(shardings)} == {PartitionSpec(*spec)}


def test_refuses_a_pool_with_too_few_columns() -> None:
    config = toy_config()
    pool = replace(config.pools[0], columns=config.pools[0].columns[:1])
    with pytest.raises(ValueError, match="group 0: expected at least 2 columns in pool 0, got 1"):
        create_pages(KVCacheConfig((pool,), config.kv_cache_groups))


def test_refuses_a_column_of_another_layers_layout() -> None:
    config = toy_config()
    other = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32").page_layout("cpu")
    pool = replace(config.pools[0], columns=(other, other))
    with pytest.raises(ValueError, match=r"layer 'layers.0': expected pages of PageLayout\(kind='split'"):
        create_pages(KVCacheConfig((pool,), config.kv_cache_groups))


def test_pools_that_share_slabs_have_one_array_a_column() -> None:
    """Twice as many ids as slabs, each with a page of K and V on whole rows of 128 words."""
    config = replace(toy_config(num_blocks=6), slabs=SlabSpec(3, (2,)))
    pages = create_pages(config)
    assert [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pages)] == [((3, 4, 128), "uint32")] * 2
    assert pages.num_pages(0) == 6
    apart = create_pages(toy_config(num_blocks=6))
    assert pages.page_shapes(0) == apart.page_shapes(0)
    for column, typed in zip(pages.pools[0], apart.pools[0], strict=True):
        assert [(x.shape, x.dtype) for x in column] == [(x.shape, x.dtype) for x in typed]


def test_states_beside_a_tpus_tokens_lie_as_its_kernels_take_them() -> None:
    """Channels as lanes; and slabs are whole tiles of eight rows."""
    tokens = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=128, dtype="bfloat16")
    states = MambaSpec(block_size=2, shapes=((256, 3),), dtypes=("bfloat16",))
    pools = tuple(KVCachePoolSpec(3 * n, (spec.page_layout("tpu"),)) for n, spec in ((1, tokens), (1, states)))
    groups = (KVCacheGroupSpec(("layers.0",), tokens), KVCacheGroupSpec(("layers.1",), states, pool_id=1))
    pages = create_pages(KVCacheConfig(pools, groups, slabs=SlabSpec(3, (1, 1))))
    assert pages.slabs is not None
    ((place,),) = pages.slabs.places[1]
    assert place.stored_shape == (2, 3, 128)
    assert [leaf.shape for leaf in jax.tree.leaves(pages)] == [(3, 8, 128)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_every_rank_has_all_slabs_and_every_device_its_rows(platform: str) -> None:
    """Rows of two heads are those of two devices with one each, in every slab of three data ranks."""
    mesh = Mesh(np.array(jax.devices()[:1] * 6).reshape(3, 2), ("data", "tensor"))
    spec = FullAttentionSpec(block_size=2, num_kv_heads=4, head_size=128, dtype="float32")
    pool = KVCachePoolSpec(8, (spec.page_layout(platform, 2),))
    config = KVCacheConfig((pool,), (KVCacheGroupSpec(("layers.0",), spec),), slabs=SlabSpec(4, (2,)))
    pages = page_shapes(config, Placement.create(mesh))
    assert [leaf.shape for leaf in jax.tree.leaves(pages)] == [(3 * 4, 2 * 2 * 8, 128)]
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(pages)} == {PartitionSpec("data", ("tensor",))}
    assert pages.num_pages(0) == 8
    apart = page_shapes(replace(config, slabs=None), Placement.create(mesh))
    assert pages.page_shapes(0) == apart.page_shapes(0)
    assert pages.specs(0, 0) == PartitionSpec("data", ("tensor",))
    assert apart.specs(0, 0) == tuple(array.sharding.spec for array in apart.column(0, 0))
