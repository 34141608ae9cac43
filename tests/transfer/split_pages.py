"""Laws of transfers between meshes. Run by test_split_pages.py in a process of its own, which has eight CPU devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.device import KVPages, Placement
from kvjax.engine import LLMEngine
from kvjax.models import load_model
from kvjax.transfer import DecodeConnector, PageReader, PageWriter, PrefillConnector, RequestPages
from kvjax.transfer.head_part import HeadPart, on_host
from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_write import latent_write
from tests.models.golden_models import model_folder
from tests.transfer.test_engines import NUM_TOKENS as NUM_TOKENS_DECODED
from tests.transfer.test_engines import FaultyPeer, Pair, drained
from tests.transfer.test_engines import config_of as engine_config
from tests.transfer.worlds import Dense, config_of, nan_pages, specs, tables, written

NUM_TOKENS = 45
MESHES = {
    "two ranks": {"context": 2},
    "context": {"context": 4},
    "data": {"data": 2},
    "all": {"data": 2, "context": 2, "tensor": 2},
}


def layers_on(page_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """A layer of each kind that context and data ranks can have."""
    return {name: spec for name, spec in specs(page_size, dtype).items() if name != "compressed"}


def placement_of(name: str) -> Placement:
    axes = MESHES[name]
    return Placement.create(jax.make_mesh(tuple(axes.values()), tuple(axes)))


def share_of_spec(spec: KVCacheSpec, num_context: int, num_shards: int) -> KVCacheSpec:
    """What one device has of a layer."""
    if isinstance(spec, MambaSpec):
        return replace(spec, shapes=tuple((shape[0] // num_shards, *shape[1:]) for shape in spec.shapes))
    spec = replace(spec, block_size=spec.block_size // num_context)
    return replace(spec, num_kv_heads=spec.num_kv_heads // num_shards) if len(spec.entry_shapes) == 2 else spec


def share_of_pages(
    layers: dict[str, KVCacheSpec],
    platform: str,
    placement: Placement,
    request: RequestPages,
    dense: Dense,
    at: dict[str, int],
) -> KVPages:
    """The pages of the device at a place of the mesh: token t of a block on context rank `t % size`, at `t // size`."""
    size, shards = placement.num_context, placement.num_shards
    own = {name: share_of_spec(spec, size, shards) for name, spec in layers.items()}
    config = config_of(own, platform)
    pages = nan_pages(config)
    if at.get("data", 0) != request.rank:
        return pages
    for i, (name, spec) in enumerate(layers.items()):
        table, column = request.tables[i], pages.column(i, 0)
        arrays = [
            np.split(array, shards, axis=0 if isinstance(spec, MambaSpec) else 1)[at.get("tensor", 0)]
            if len(dense.arrays[name]) == 2
            else array
            for array in dense.arrays[name]
        ]
        if isinstance(spec, MambaSpec):
            new = tuple(old.at[int(table[0])].set(x.astype(old.dtype)) for old, x in zip(column, arrays, strict=True))
            pages = pages.with_column(i, 0, new)
            continue
        tokens = np.arange(NUM_TOKENS)
        tokens = tokens[(tokens % size == at.get("context", 0)) & (table[tokens // spec.block_size] > 0)]
        per_page = spec.block_size // size
        slots = jnp.asarray(table[tokens // spec.block_size] * per_page + tokens % spec.block_size // size, jnp.int32)
        column = tuple(array.at[table[table > 0]].set(0) for array in column)
        values = [jnp.asarray(array[tokens], column[0].dtype) for array in arrays]
        if len(values) == 2:
            new = kv_write(values[0], values[1], column, slots, backend="reference")
        else:
            new = latent_write(values[0], column, slots, page_size=per_page, backend="reference")
        pages = pages.with_column(i, 0, new)
    return pages


def shard_at(pages: KVPages, placement: Placement, at: dict[str, int]) -> list[np.ndarray]:
    """What the device at a place of the mesh holds of every array."""
    device = placement.mesh.devices[tuple(at.get(axis, 0) for axis in placement.mesh.axis_names)]
    return [
        np.asarray(next(shard.data for shard in array.addressable_shards if shard.device == device))
        for array in jax.tree.leaves(pages)
    ]


@pytest.mark.parametrize(
    ("name", "platform", "dtype"),
    [
        ("two ranks", "tpu", "bfloat16"),
        pytest.param("two ranks", "cpu", "float32", marks=pytest.mark.sweep),
        pytest.param("all", "cpu", "float32", marks=pytest.mark.sweep),
        pytest.param("all", "tpu", "bfloat16", marks=pytest.mark.sweep),
        pytest.param("context", "cpu", "float32", marks=pytest.mark.sweep),
        pytest.param("context", "tpu", "bfloat16", marks=pytest.mark.sweep),
        pytest.param("data", "tpu", "float32", marks=pytest.mark.sweep),
    ],
)
def test_every_device_gets_and_gives_its_tokens_heads_and_requests(name: str, platform: str, dtype: str) -> None:
    """From one device with pages of 4 to a mesh with pages of 16, and back: dense KV written on either side."""
    placement, one = placement_of(name), Placement.create()
    ours, theirs = layers_on(4, dtype), layers_on(16, dtype)
    source, target = config_of(ours, "cpu"), config_of(theirs, platform)
    dense = Dense.random(ours, NUM_TOKENS, 3)
    tables_here = tuple(np.where(table > 0, table, 1) for table in tables(ours, NUM_TOKENS, 1))  # windows keep all
    sent = RequestPages(tuple(_distinct(table) for table in tables_here), 0, NUM_TOKENS)
    rank = placement.num_data - 1
    arrives = RequestPages(tables(theirs, NUM_TOKENS, 2), 0, NUM_TOKENS, rank)
    before = written(source, nan_pages(source), sent, dense, range(NUM_TOKENS))

    cache = PageReader(source, one).read(before, sent)
    writer = PageWriter(target, placement)
    pages = writer.write(nan_pages(target, placement), arrives, writer.placed(cache))
    for place in np.ndindex(*placement.mesh.devices.shape):
        at = dict(zip(placement.mesh.axis_names, place, strict=True))
        wanted = share_of_pages(theirs, platform, placement, arrives, dense, at)
        chex.assert_trees_all_equal(shard_at(pages, placement, at), [np.asarray(x) for x in jax.tree.leaves(wanted)])

    again = PageReader(target, placement).read(pages, arrives)
    back = PageWriter(source, one)
    result = back.write(nan_pages(source), sent, back.placed(again))
    full = [i for i, layer in enumerate(theirs) if layer != "window"]  # which there has left some pages behind
    for i in full:
        chex.assert_trees_all_equal(result.column(i, 0), before.column(i, 0))
    for layer, arrays in zip(again.header.layers, again.arrays, strict=True):
        for array in arrays:  # as another process would be sent them
            whole = np.asarray(array)
            if not layer.has_heads:
                np.testing.assert_array_equal(on_host(array, None), whole)
                continue
            for num_parts in (1, 2, 4):
                heads = [HeadPart(i, i + 1, num_parts).heads(array.shape[1]) for i in range(num_parts)]
                pieces = [on_host(array, part) for part in heads]
                np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


@pytest.mark.parametrize(
    ("name", "sender", "receiver"),
    [
        ("llama", {"data": 2}, {"data": 2}),
        *[
            pytest.param(name, sender, receiver, marks=pytest.mark.sweep)
            for name in ("gemma3", "deepseek_v3")
            for sender, receiver in (
                ({"context": 2, "tensor": 2}, {"tensor": 2}),
                ({"data": 2, "context": 2}, {"data": 4}),
                ({"tensor": 2}, {"data": 2, "context": 2, "tensor": 2}),
            )
        ],
    ],
)
def test_engines_of_other_meshes_give_the_tokens_of_one(
    name: str, sender: dict[str, int], receiver: dict[str, int]
) -> None:
    """Prompts are computed on one mesh and decoded on another, each by the data rank that admits the request."""
    pair = Pair(name, meshes=[jax.make_mesh(tuple(axes.values()), tuple(axes)) for axes in (sender, receiver)])
    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, golden)
    pair.decode.step()
    num_used = [len(manager.request_table) > 0 for manager in pair.decode.managers]
    assert sum(num_used) == min(receiver.get("data", 1), len(pair.goldens))
    results = drained(pair.decode)
    pair.assert_golden(results)
    assert pair.target.num_failed == 0
    assert sum(step.num_new_tokens for step in pair.decode.step_stats) == NUM_TOKENS_DECODED * len(results)


def test_a_rank_that_there_is_not_is_refused() -> None:
    layers = layers_on(4, "float32")
    config: KVCacheConfig = config_of(layers, "cpu")
    placement = placement_of("data")
    request = RequestPages(tables(layers, 10, 1), 0, 10, rank=2)
    with pytest.raises(ValueError, match="expected a data rank below 2, got 2"):
        PageReader(config, placement).read(nan_pages(config, placement), request)


def _distinct(table: np.ndarray) -> np.ndarray:
    """A table of other pages, of as many columns."""
    return np.random.default_rng(table.size).permutation(np.arange(1, 40))[: table.size].astype(np.int32)


def test_an_engine_refuses_a_connector_of_another_mesh() -> None:
    """Of other devices, or split otherwise; axes of one device make no difference."""
    devices = np.array(jax.devices())
    peer: Any = FaultyPeer(0)
    mesh = Mesh(devices[:2], ("tensor",))
    model = load_model(model_folder("llama"), "float32", mesh)
    others = (Mesh(devices[2:4], ("tensor",)), Mesh(devices[:2], ("data",)), Mesh(devices[:1], ("tensor",)), None)
    for placement in map(Placement.create, others):
        for connector in (PrefillConnector(peer, placement=placement), DecodeConnector(peer, placement=placement)):
            with pytest.raises(
                ValueError, match=r"pages on a mesh \(tensor=2\) of devices \[0, 1\], got one of pages on"
            ):
                LLMEngine(model, engine_config(8), mesh=mesh, connector=connector)
    same = Placement.create(Mesh(devices[:2].reshape(1, 2), ("data", "tensor")))
    LLMEngine(model, engine_config(8), mesh=mesh, connector=PrefillConnector(peer, placement=same))
