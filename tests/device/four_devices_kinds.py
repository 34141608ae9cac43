"""Every kind of layer on a mesh of four devices gives what one gives. Run by test_mesh.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from kvjax.core import KVCacheManager, MRopePositions, Request
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device import Bucket, Buckets, EmbedBuffer, KVPages, Placement, create_pages, make_update_step
from kvjax.planning import plan_kv_cache
from tests.device import toy_inputs
from tests.device.aliases import assert_in_place
from tests.device.encoder import test_encoder as encoder
from tests.device.layers import test_compressed_attention as compressed
from tests.device.layers import test_kv_kinds as kv
from tests.device.layers import test_latent_attention as latent
from tests.device.layers import test_state_shapes as state_shapes
from tests.device.toy_kinds import BUCKETS, Toy, serve_mixed

TOYS: dict[str, Callable[..., Toy]] = {
    "latent": latent.make_toy,
    "compressed": compressed.make_toy,
    "kv": kv.make_toy,
}

# With several CPU devices XLA of jax 0.10 copies arrays that layers of several groups share; with one it does not.
COPIES_NO_SHARED_PAGES = jax.__version_info__ >= (0, 11)


def shards(pages: KVPages) -> set[tuple[int, ...]]:
    """Shapes of what one device holds, without the number of pages."""
    return {leaf.addressable_shards[0].data.shape[1:] for leaf in jax.tree.leaves(pages)}


@pytest.mark.parametrize(
    ("kind", "platform"),
    [
        ("latent", "cpu"),
        pytest.param("latent", "tpu", marks=pytest.mark.sweep),
        pytest.param("compressed", "cpu", marks=pytest.mark.sweep),
        pytest.param("compressed", "tpu", marks=pytest.mark.sweep),
        ("kv", "cpu"),
    ],
)
def test_four_devices_give_what_one_sequence_alone_gives(kind: str, platform: str) -> None:
    """As one device does, by the same checks; pages stay where they lie and are updated in place."""
    toy = TOYS[kind](platform, placement=Placement.over_heads(4))
    pages = create_pages(toy.config, toy.step.placement)
    if kind != "compressed" or COPIES_NO_SHARED_PAGES:
        assert_in_place(toy.step.compiled(pages, BUCKETS.steps[0]), pages)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(pages)]
    pages = toy.step.warmup(pages)
    assert not any(leaf.any() for leaf in jax.tree.leaves(pages)), "an empty batch writes nothing"
    assert [leaf.sharding for leaf in jax.tree.leaves(serve_mixed(toy, 9).pages)] == shardings
    assert toy.step.num_compiled == 1, "warm-up has the shapes of a step"


def test_latents_are_whole_on_every_device_and_kv_is_split() -> None:
    toy = latent.make_toy("cpu", placement=Placement.over_heads(4))
    assert shards(create_pages(toy.config, toy.step.placement)) == {(4, 14), (4, 1, 8)}


def test_states_that_do_not_split_are_whole_on_every_device() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
    state_shapes.run(Placement.create(mesh, {"kv_head": None}))


def test_query_heads_that_do_not_split_are_refused() -> None:
    toy = latent.make_toy("cpu", placement=Placement.over_heads(4), heads=6)
    with pytest.raises(ValueError, match=r"layer 'layers.0': expected query heads that split over 4 devices, got 6"):
        serve_mixed(toy, 9)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.sweep)])
def test_encoders_write_and_queries_read_the_heads_of_their_device(platform: str) -> None:
    """Heads over two devices: the logits of the whole sequence, and pages that stay where they lie."""
    model, placement = toy_inputs.toy_model("encoder"), Placement.over_heads(2)
    config = encoder.config_of(model, platform, tensor_parallel=2)
    step = make_update_step(
        model.module, config, encoder.BUCKETS, placement=placement, encoder_shapes=toy_inputs.ENCODER_SHAPES
    )
    pages = create_pages(config, placement)
    assert_in_place(step.compiled_encoder(pages, (14, 5)), pages)
    server, tokens, features = encoder.Server(step, config), encoder.tokens_of(0, 13), encoder.features_of(0)
    server.add("a", tokens, features, 13)
    logits = server.run({"a": 13}, {"a": features})["a"]
    expected = toy_inputs.dense_logits(model.module, tokens, features=features)[-1]
    np.testing.assert_allclose(logits, expected, **encoder.CLOSE)
    assert jax.tree.map(lambda leaf: leaf.sharding, server.pages) == jax.tree.map(lambda leaf: leaf.sharding, pages)


def test_vectors_are_whole_on_every_device() -> None:
    """A prompt of tokens and vectors, with positions of three axes."""
    model, placement = toy_inputs.toy_model("mrope"), Placement.over_heads(4)
    specs = model.config.kv_cache_specs(4)
    config = plan_kv_cache(specs, num_blocks=40, max_model_len=40, max_in_flight_tokens=16, tensor_parallel=4).config
    buckets = Buckets((Bucket(16, 2, 8),))
    step = make_update_step(model.module, config, buckets, placement=placement, mrope=True, embeds=True)
    buffer = EmbedBuffer(6, toy_inputs.EMBED_DIM, "float32", placement)
    tokens = [1, 2, *[toy_inputs.PLACEHOLDER] * 4, 3]
    vectors = np.random.default_rng(0).standard_normal((4, toy_inputs.EMBED_DIM)).astype(np.float32)
    buffer.write(np.array([5, 1, 0, 3]), vectors)
    manager, positions = KVCacheManager(config, 40, hash_block_size=4), MRopePositions()
    request = Request("a", tokens)
    assert manager.allocate_slots(request, 7) is not None
    grid = np.array([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])
    positions.set(request.row, grid)
    plan = build_step_plan(manager, np.array([request.row]), np.array([7]), mrope=positions)
    index = np.array([-1, -1, 5, 1, 0, 3, -1])
    output = step(create_pages(config, placement), plan, embeds=buffer.array, embed_index=index)
    expected = toy_inputs.dense_logits(model.module, tokens, vectors=vectors, positions=grid)[-1]
    np.testing.assert_allclose(np.asarray(output.logits)[0], expected, **encoder.CLOSE)


def test_there_are_four_devices() -> None:
    assert len(jax.devices()) == 4
