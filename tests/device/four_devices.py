"""Laws of a mesh of four devices. Run by test_mesh.py in a process of its own, which has four virtual CPU devices."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheConfig
from kvjax.device import (
    AttentionOptions,
    Bucket,
    Buckets,
    DeviceBatch,
    KVPages,
    Placement,
    StepCache,
    copy_pages,
    create_pages,
    gather_pages,
    make_update_step,
    scatter_pages,
    write_kv,
    zero_pages,
)
from kvjax.device.inputs.batch import DeviceStates
from kvjax.device.model.weights_digest import leaves_digest
from kvjax.device.pages.page_ops import copy_pages_padded, pad_ids, zero_pages_padded
from kvjax.device.pages.rank_pages import RankStaging, gather_for_ranks, gather_rank_pages, scatter_rank_pages
from kvjax.planning import Parallelism, plan_kv_cache
from pallas_kernels.ssm_update import causal_conv1d, selective_scan
from tests.device.aliases import assert_in_place
from tests.device.toy import HEAD_DIM, KV_HEADS, NUM_BLOCKS, Q_HEADS, VOCAB, ToyHost, ToyModel, sample, toy_config

BUCKET = Bucket(16, 2, 8)
PLACEMENTS = {
    "whole on one": Placement.create(),
    "split over four": Placement.over_heads(4),
    "split over two of two by two": Placement.create(
        Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")), {"kv_head": "model"}
    ),
    "split over two of two by two, as jax makes it": Placement.create(
        jax.make_mesh((2, 2), ("data", "model")), {"kv_head": "model"}
    ),
}


PAGE_WORK = {("split over four", "tpu"), ("split over two of two by two, as jax makes it", "cpu")}  # outside sweeps


def generate(placement: Placement, platform: str) -> tuple[list[int], np.ndarray]:
    """Tokens of two requests decoded together after a chunked prefill, and all logits on the way."""
    config = toy_config(platform=platform, num_layers=2)
    buckets = Buckets((BUCKET,))
    model = ToyModel(num_layers=2)
    step = make_update_step(model, config, buckets, placement=placement, sample_fn=sample, return_logits=True)
    pages, host = create_pages(config, placement), ToyHost(config)
    sampling = {"offset": np.zeros(2, np.int32)}
    assert_in_place(step.compiled(pages, BUCKET, sampling=sampling), pages)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, pages)
    for row in range(2):
        host.add(row, np.random.default_rng(row).integers(0, VOCAB, 11))
    tokens, logits = [], []
    for counts in ([8, 8], [3, 3], *[[1, 1]] * 6):
        output = step(pages, host.plan([0, 1], counts, wants_logits=np.array([True, True])), sampling=sampling)
        pages = output.pages
        logits.append(np.asarray(output.logits))
        if counts != [8, 8]:
            for row, token in enumerate(output.sampled.tolist()):
                host.append(row, token)
                tokens.append(token)
    assert step.num_compiled == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, pages) == shardings
    return tokens, np.stack(logits)


def test_there_are_four_devices() -> None:
    assert len(jax.devices()) == 4


@functools.cache
def generate_on_one() -> tuple[list[int], np.ndarray]:
    """What every placement and layout of pages must give."""
    return generate(PLACEMENTS["whole on one"], "cpu")


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        pytest.param("split over four", "cpu", marks=pytest.mark.sweep),
        pytest.param("split over two of two by two", "cpu", marks=pytest.mark.sweep),
        ("split over two of two by two, as jax makes it", "cpu"),
        ("split over four", "tpu"),
    ],
)
def test_every_placement_gives_equal_tokens(name: str, platform: str) -> None:
    expected_tokens, expected_logits = generate_on_one()
    tokens, logits = generate(PLACEMENTS[name], platform)
    assert tokens == expected_tokens
    chex.assert_trees_all_close(logits, expected_logits, atol=2e-5, rtol=1e-7)


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        pytest.param(*case, marks=[] if case in PAGE_WORK else [pytest.mark.sweep])
        for case in itertools.product(list(PLACEMENTS)[1:], ("cpu", "tpu"))
    ],
)
def test_page_work_keeps_the_split_and_happens_in_place(name: str, platform: str) -> None:
    config = toy_config(platform=platform)
    pages = create_pages(config, PLACEMENTS[name])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, pages)
    ids = pad_ids(np.array([1, 2]))
    for program in (copy_pages_padded.lower(pages, 0, ids, ids), zero_pages_padded.lower(pages, 0, ids)):
        assert_in_place(program.compile(), pages)
    pages = jax.jit(lambda p: jax.tree.map(lambda x: x.at[1].set(7.0), p), out_shardings=shardings)(pages)
    pages = zero_pages(copy_pages(pages, 0, np.array([1]), np.array([2])), 0, np.array([1]))
    assert jax.tree.map(lambda leaf: leaf.sharding, pages) == shardings
    for leaf in jax.tree.leaves(gather_pages(pages, 0, np.array([1, 2]))):
        assert not np.asarray(leaf[0]).any()
        assert (np.asarray(leaf[1]) == 7.0).all()


def test_pages_of_a_data_rank_are_read_and_written_by_its_devices_alone() -> None:
    """Ranks of two devices each: what rank 1 gives is its page, where it lies; what it takes changes no other page."""
    placement = Placement.create(jax.make_mesh((2, 2), ("data", "tensor")))
    pages = create_pages(toy_config(), placement)
    count = pages.num_pages(0)
    pages = jax.tree.map(lambda array: array + jnp.arange(2 * count, dtype=array.dtype)[:, None, None, None], pages)
    before = jax.tree.map(np.array, pages.pools)
    found = gather_rank_pages(pages, 0, 1, np.array([3, 2]))
    for array, whole in zip(jax.tree.leaves(found), jax.tree.leaves(before[0]), strict=True):
        assert array.devices() == set(jax.devices()[2:])
        np.testing.assert_array_equal(np.asarray(array)[:2], whole[[count + 3, count + 2]])
    staged = jax.tree.map(lambda array: -np.asarray(array), found)
    values = RankStaging().put(staged, pages.shardings[0], 1)
    pages = scatter_rank_pages(pages, 0, 1, np.array([5, 6]), values)
    copies = gather_for_ranks(pages, 0, 1, np.array([5]))
    pages = scatter_rank_pages(pages, 0, 1, np.array([7]), copies)
    for array, whole in zip(jax.tree.leaves(pages.pools[0]), jax.tree.leaves(before[0]), strict=True):
        whole[[count + 5, count + 6, count + 7]] = -whole[[count + 3, count + 2, count + 3]]
        np.testing.assert_array_equal(np.asarray(array), whole)
    with pytest.raises(ValueError, match="expected page ids in \\[1, "):
        scatter_rank_pages(pages, 0, 1, np.array([0]), values)


def test_weights_on_a_mesh_as_jax_makes_it_run() -> None:
    """A model whose owner placed it with Explicit axes runs as it does with Auto ones."""
    model, mesh = ToyModel(num_layers=2), jax.make_mesh((4,), ("tensor",))

    def run(axes: Mesh) -> np.ndarray:
        graph, weights = nnx.split(model)
        weights = jax.device_put(weights, NamedSharding(axes, PartitionSpec()))
        placement, config = Placement.create(axes), toy_config(num_layers=2)
        step = make_update_step(nnx.merge(graph, weights), config, Buckets((BUCKET,)), placement=placement)
        host = ToyHost(config)
        host.add(0, np.arange(9))
        return np.asarray(step(create_pages(config, placement), host.plan([0], [9])).logits)

    np.testing.assert_array_equal(run(mesh), run(Mesh(mesh.devices, mesh.axis_names)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_devices_that_share_weights_make_the_digest_of_one(dtype: str) -> None:
    """Whatever is split, on meshes of Auto and of Explicit axes."""
    array = np.arange(128).reshape(8, 16).astype(jnp.dtype(dtype))
    digests = {leaves_digest([("w", array)])}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
        for split in (("a", "b"), (None, ("a", "b")), ("b",), ()):
            digests.add(leaves_digest([("w", jax.device_put(array, NamedSharding(mesh, PartitionSpec(*split))))]))
    assert len(digests) == 1


def test_a_device_holds_its_heads_alone() -> None:
    pages = create_pages(toy_config(), PLACEMENTS["split over four"])
    shards = {shard.data.shape for leaf in jax.tree.leaves(pages) for shard in leaf.addressable_shards}
    assert shards == {(NUM_BLOCKS, 4, 1, HEAD_DIM)}


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.sweep)])
def test_sinks_and_scales_go_with_their_heads(platform: str) -> None:
    config = toy_config(platform=platform, num_layers=2)
    host, rng = ToyHost(config), np.random.default_rng(0)
    host.add(0, np.zeros(9, np.int32))
    batch = DeviceBatch.from_plan(host.plan([0], [9]), BUCKET)
    q, k, v = (rng.normal(size=(16, heads, HEAD_DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    sinks, k_scale = np.arange(Q_HEADS, dtype=np.float32), np.arange(1, KV_HEADS + 1, dtype=np.float32) / 2

    def attend(placement: Placement) -> np.ndarray:
        def step(pages: KVPages, batch: DeviceBatch, sinks: jax.Array, k_scale: jax.Array) -> jax.Array:
            scales = {"k_scale": k_scale, "v_scale": jnp.float32(3.0)}
            options = AttentionOptions(sm_scale=0.3, sinks=sinks, **scales)
            return StepCache(pages, batch, config, placement)("layers.1", q, k, v, options)

        return np.asarray(jax.jit(step)(create_pages(config, placement), batch, sinks, k_scale))

    expected = attend(PLACEMENTS["whole on one"])
    assert expected[:9].any(axis=(1, 2)).all()
    np.testing.assert_allclose(attend(PLACEMENTS["split over four"]), expected, atol=1e-5)


def test_one_head_of_8_bits_a_device_takes_half_of_the_bytes() -> None:
    """Two tokens share words of a device's one head: outputs of two steps are those of split pages on one device."""
    sizes = {"block_size": 4, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
    rng, four = np.random.default_rng(1), PLACEMENTS["split over four"]
    steps = [[rng.integers(-3, 4, (16, n, HEAD_DIM)) for n in (Q_HEADS, KV_HEADS, KV_HEADS)] for _ in range(2)]

    def config_of(dtype: str, platform: str, tensor: int) -> KVCacheConfig:
        specs = {"layers.0": FullAttentionSpec(**sizes, dtype=dtype)}
        sharing = {"platform": platform, "parallel": Parallelism(tensor=tensor)}
        return plan_kv_cache(specs, num_blocks=16, max_model_len=32, max_in_flight_tokens=16, **sharing).config

    def attend(config: KVCacheConfig, placement: Placement) -> list[np.ndarray]:
        def step(pages: KVPages, batch: DeviceBatch, *qkv: jax.Array) -> tuple[jax.Array, KVPages]:
            cache = StepCache(pages, batch, config, placement)
            return cache("layers.0", *qkv, AttentionOptions(sm_scale=0.3)), cache.pages

        pages, host, outs = create_pages(config, placement), ToyHost(config), []
        host.add(0, np.zeros(11, np.int32))
        for count, qkv in zip((7, 4), steps, strict=True):
            batch = DeviceBatch.from_plan(host.plan([0], [count]), BUCKET)
            out, pages = jax.jit(step)(pages, batch, *(x.astype(np.float32) for x in qkv))
            outs.append(np.asarray(out)[:count])
        return outs

    config = config_of("int8", "tpu", 4)
    expected = attend(config_of("int8", "cpu", 1), PLACEMENTS["whole on one"])
    for got, want in zip(attend(config, four), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    pages = create_pages(config, four)
    shards = {shard.data.shape for leaf in jax.tree.leaves(pages) for shard in leaf.addressable_shards}
    assert shards == {(16, 2, 1, 4, 128)}
    assert 2 * pages.num_bytes == create_pages(config_of("bfloat16", "tpu", 4), four).num_bytes


def test_tpu_kernels_run_once_per_device() -> None:
    """Interpreted: pages written, copied, zeroed, read and put back by kernels are those of the references."""
    placement = Placement.over_heads(2)
    config = toy_config(16, platform="tpu")
    kv = np.random.default_rng(0).normal(size=(2, 6, KV_HEADS, HEAD_DIM)).astype(np.float32)

    def work(backend: str) -> list[np.ndarray]:
        pages = create_pages(config, placement)
        pages = write_kv(pages, 0, 1, *kv, np.array([4, 5, 6, 7, -1, 9], np.int32), backend=backend)
        pages = copy_pages(pages, 0, np.array([1, 2]), np.array([5, 4]), (4,), backend=backend)
        pages = zero_pages(pages, 0, np.array([2]), (4,), backend=backend)
        values = gather_pages(pages, 0, np.array([5, 0]), (4,), backend=backend)
        pages = scatter_pages(pages, 0, np.array([7, 8]), values, (4,), backend=backend)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(pages)]

    expected = work("reference")
    assert expected[1][[1, 4, 5, 7]].any(axis=(1, 2, 3, 4)).all()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        chex.assert_trees_all_equal(work("tpu"), expected, strict=True)


StateShapes: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
SHAPES: StateShapes = (((256, 3), (256, 8)), ((16, 3), (4, 2, 3)))  # convolution and scan of a layer of Mamba 1, of 2
STATE_PAGES = 6


def recurrent_config(shapes: StateShapes) -> KVCacheConfig:
    state: dict[str, Any] = {"dtypes": ("float32",) * 2, "block_size": 4}
    specs = {f"layers.{i}": MambaSpec(shapes=layer, **state) for i, layer in enumerate(shapes)}
    return plan_kv_cache(specs, num_blocks=STATE_PAGES, max_model_len=32, max_in_flight_tokens=8).config


def recurrent_batch() -> DeviceBatch:
    """Two decoding sequences, one of four tokens that starts from nothing, and padding."""
    batch = DeviceBatch.empty(Bucket(8, 4, 8), 1, recurrent={0: 0})
    states = DeviceStates(np.int32([3, 1, 0, 0]), np.int32([2, 1, 5, 0]), np.array([True, True, False, False]))
    return replace(
        batch,
        query_start_loc=np.int32([0, 1, 2, 6, 6]),
        distribution=np.int32([2, 2, 3]),
        groups=(replace(batch.groups[0], states=states),),
    )


def update_recurrent_layers(
    placement: Placement, backend: str, shapes: StateShapes
) -> tuple[list[np.ndarray], set[tuple[int, ...]]]:
    """Outputs of the layers and all states; shapes of the states that the ops got. `backend` is the convolution's."""
    config, rng = recurrent_config(shapes), np.random.default_rng(0)
    seen = set()

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def convolve(states, step, x, weight):  # type: ignore[no-untyped-def]
        seen.add(states[0].shape)
        out, conv = causal_conv1d(x, states[0], weight, *step, backend=backend)
        return out, (conv,)

    def scan(states, step, *inputs):  # type: ignore[no-untyped-def]
        seen.add(states[0].shape)
        x, dt, a, b, c, d = inputs
        out, scanned = selective_scan(x, states[0], dt, a, b, c, *step, d=d, backend="reference")
        return out, (scanned,)

    def run(pages: KVPages, batch: DeviceBatch, inputs: list[tuple[jax.Array, ...]]) -> tuple[list[jax.Array], KVPages]:
        cache, outs = StepCache(pages, batch, config, placement), []
        for layer, (convolved, scanned) in enumerate(inputs):
            name = f"layers.{layer}"
            outs.append(cache.update_states(name, convolve, convolved, (1, 0), arrays=(0,)))
            outs.append(cache.update_states(name, scan, scanned, (1, 1, 0, None, None, 0), arrays=(1,)))
        assert not cache.unused_layers
        return outs, cache.pages

    inputs = []
    for (channels, before), (heads, *inner) in shapes:
        head, states = inner[:-1], inner[-1]
        of_b = (8, 1, states) if head else (8, states)
        a = -np.abs(normal(heads) if head else normal(heads, states))
        scanned = (normal(8, heads, *head), normal(8, heads), a, normal(*of_b), normal(*of_b), normal(heads))
        inputs.append(((normal(8, channels), normal(channels, before + 1)), scanned))
    pages = create_pages(config, placement)
    is_own = np.arange(STATE_PAGES) > 0  # not the null page
    values = jax.tree.map(lambda leaf: normal(*leaf.shape) * is_own.reshape(-1, *[1] * (leaf.ndim - 1)), pages)
    pages = jax.device_put(values, jax.tree.map(lambda leaf: leaf.sharding, pages))
    outs, after = jax.jit(run, donate_argnums=0)(pages, recurrent_batch(), inputs)
    for old, new in zip(jax.tree.leaves(pages), jax.tree.leaves(after), strict=True):
        assert old.is_deleted()
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    return [np.asarray(leaf) for leaf in (*outs, *jax.tree.leaves(after))], seen


@pytest.mark.parametrize(
    ("num_devices", "backend", "shapes"), [(4, "reference", SHAPES), (2, "tpu", SHAPES[:1])], ids=["reference", "tpu"]
)
def test_states_of_recurrent_layers_are_split_with_their_heads(
    num_devices: int, backend: str, shapes: StateShapes
) -> None:
    """As one device updates them by the references; the convolution's kernel is interpreted, the scan's is slow to."""
    expected, whole = update_recurrent_layers(PLACEMENTS["whole on one"], "reference", shapes)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        found, shards = update_recurrent_layers(Placement.over_heads(num_devices), backend, shapes)
    assert whole == {(STATE_PAGES, *shape) for layer in shapes for shape in layer}
    assert shards == {(pages, size // num_devices, *rest) for pages, size, *rest in whole}
    chex.assert_trees_all_close(found, expected, atol=1e-5, rtol=1e-5, strict=True)


def test_heads_that_do_not_split_are_refused() -> None:
    config = toy_config(kv_heads=2)
    with pytest.raises(ValueError, match="2 KV heads do not split over 4 devices; use fewer devices"):
        create_pages(config, PLACEMENTS["split over four"])
    with pytest.raises(ValueError, match="2 KV heads do not split over 4 devices; use fewer devices"):
        make_update_step(ToyModel(kv_heads=2), config, Buckets((BUCKET,)), placement=PLACEMENTS["split over four"])
