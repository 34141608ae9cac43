"""Every kind of layer on a mesh of four devices gives what one gives. Run by test_mesh.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from kvjax.device import KVPages, Placement, create_pages
from tests.device import test_compressed_attention as compressed
from tests.device import test_kv_kinds as kv
from tests.device import test_latent_attention as latent
from tests.device.aliases import assert_in_place
from tests.device.toy_kinds import BUCKETS, Toy, serve_mixed

TOYS: dict[str, Callable[..., Toy]] = {
    "latent": latent.make_toy,
    "compressed": compressed.make_toy,
    "kv": kv.make_toy,
}


def shards(pages: KVPages) -> set[tuple[int, ...]]:
    """Shapes of what one device holds, without the number of pages."""
    return {leaf.addressable_shards[0].data.shape[1:] for leaf in jax.tree.leaves(pages)}


@pytest.mark.parametrize(
    ("kind", "platform"), [("latent", "cpu"), ("latent", "tpu"), ("compressed", "tpu"), ("kv", "cpu")]
)
def test_four_devices_give_what_one_sequence_alone_gives(kind: str, platform: str) -> None:
    """As one device does, by the same checks; pages stay where they lie and are updated in place."""
    toy = TOYS[kind](platform, placement=Placement.over_heads(4))
    pages = create_pages(toy.config, toy.step.placement)
    assert_in_place(toy.step.compiled(pages, BUCKETS.steps[0]), pages)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(pages)]
    pages = toy.step.warmup(pages)
    assert not any(leaf.any() for leaf in jax.tree.leaves(pages)), "an empty batch writes nothing"
    assert [leaf.sharding for leaf in jax.tree.leaves(serve_mixed(toy, 9).pages)] == shardings
    assert toy.step.num_compiled == 1, "warm-up has the shapes of a step"


def test_latents_are_whole_on_every_device_and_kv_is_split() -> None:
    toy = latent.make_toy("cpu", placement=Placement.over_heads(4))
    assert shards(create_pages(toy.config, toy.step.placement)) == {(4, 14), (4, 1, 8)}


def test_query_heads_that_do_not_split_are_refused() -> None:
    toy = latent.make_toy("cpu", placement=Placement.over_heads(4), heads=6)
    with pytest.raises(ValueError, match=r"layer 'layers.0': expected query heads that split over 4 devices, got 6"):
        serve_mixed(toy, 9)


def test_there_are_four_devices() -> None:
    assert len(jax.devices()) == 4
