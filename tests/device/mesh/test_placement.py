"""Placement: which mesh axis the KV heads are split over, and which splits are refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.device import Placement

DEVICE = np.asarray(jax.devices()[:1])


def fake_placement(num_devices: int) -> Placement:
    """Heads over a mesh of devices that this machine need not have."""
    return Placement(AbstractMesh((num_devices,), ("tensor",), axis_types=(AxisType.Auto,)), "tensor")


def test_without_a_mesh_it_is_the_first_device() -> None:
    placement = Placement.create()
    assert placement.num_shards == 1
    assert placement.replicated.device_set == {jax.devices()[0]}


def test_the_caller_names_the_axes() -> None:
    mesh = Mesh(DEVICE.reshape(1, 1), ("data", "model"))
    assert Placement.create(mesh).head_axis is None
    assert Placement.create(mesh, {"kv_head": "model"}).head_axis == "model"
    assert Placement.create(mesh, {"kv_head": "model", "page": None}).head_axis == "model"
    assert Placement.create(Mesh(DEVICE, ("tensor",))).head_axis == "tensor"
    assert Placement.create(Mesh(DEVICE, ("tensor",)), {"kv_head": None}).head_axis is None


def test_a_mesh_as_jax_makes_it_is_taken() -> None:
    """With Explicit axes, some or all: the same placement as with Auto ones."""
    auto = Placement.create(Mesh(DEVICE.reshape(1, 1), ("data", "tensor")))
    explicit, both = jax.make_mesh((1, 1), ("data", "tensor")), (AxisType.Auto, AxisType.Explicit)
    assert explicit.axis_types == (AxisType.Explicit,) * 2
    for mesh in (explicit, Mesh(explicit.devices, explicit.axis_names, axis_types=both)):
        assert Placement.create(mesh) == Placement(mesh, "tensor", data_axis="data") == auto
        assert hash(Placement.create(mesh)) == hash(auto)
    assert Placement.create(auto.mesh).mesh is auto.mesh


def test_refuses_axes_that_cannot_be() -> None:
    mesh = Mesh(DEVICE, ("x",))
    with pytest.raises(ValueError, match=r"expected a mesh axis out of \('x',\), got 'y'"):
        Placement.create(mesh, {"kv_head": "y"})
    with pytest.raises(ValueError, match=r"pages are split along .* only, got mesh axes for \['head_dim'\]"):
        Placement.create(mesh, {"head_dim": "x"})
    with pytest.raises(ValueError, match=r"expected a mesh of Auto or Explicit axes, got .*Manual.* outside shard_map"):
        Placement(Mesh(DEVICE, ("x",), axis_types=(AxisType.Manual,)))
    with pytest.raises(ValueError, match=r"expected 1 to \d+ devices, got 1000"):
        Placement.over_heads(1000)


@pytest.mark.parametrize(
    ("platform", "dtype", "kv_heads", "message"),
    [
        (
            "cpu",
            "float32",
            6,
            "6 KV heads do not split over 4 devices; use fewer devices, or axis_names=",
        ),
        ("tpu", "bfloat16", 2, "2 KV heads do not split over 4 devices"),
        ("tpu", "float8_e4m3fn", 4, "4 KV heads of float8_e4m3fn pack 4 rows a word and do not split over 4 devices"),
        ("cpu", "float8_e4m3fn", 4, None),
        ("tpu", "float8_e4m3fn", 8, None),
        ("tpu", "bfloat16", 4, None),
        ("tpu", "float32", 4, None),
    ],
)
def test_every_device_holds_whole_heads(platform: str, dtype: str, kv_heads: int, message: str | None) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=kv_heads, head_size=8, dtype=dtype)
    layout = spec.page_layout(platform)
    Placement.create().check_heads(spec, layout)
    if message is None:
        fake_placement(4).check_heads(spec, layout)
    else:
        with pytest.raises(ValueError, match=message):
            fake_placement(4).check_heads(spec, layout)


def test_a_word_of_two_heads_is_not_split_by_its_pieces() -> None:
    """Three heads of 8 bits a device fill one and a half words, and so three rows of 128 lanes."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=12, head_size=200, dtype="int8")
    layout = spec.page_layout("tpu", 4)
    assert layout.arrays[0].page_shape == (4, 12, 4, 128)
    fake_placement(2).check_heads(spec, layout)
    with pytest.raises(ValueError, match="12 KV heads of int8 pack 4 rows a word and do not split over 4"):
        fake_placement(4).check_heads(spec, layout)


def test_heads_of_8_bits_split_to_one_a_device() -> None:
    """Pages laid out for four devices: two tokens of a head share its words."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float8_e4m3fn")
    layout = spec.page_layout("tpu", 4)
    assert layout.arrays[0].page_shape == (2, 4, 4, 128)
    fake_placement(4).check_heads(spec, layout)
    with pytest.raises(ValueError, match="4 KV heads of float8_e4m3fn pack 4 rows a word and do not split over 2"):
        fake_placement(2).check_heads(spec, layout)


def test_states_split_by_their_first_dimension() -> None:
    spec = MambaSpec(block_size=4, shapes=((8, 3), (6, 5)), dtypes=("float32",) * 2)
    fake_placement(2).check_heads(spec, spec.page_layout("cpu"))
    with pytest.raises(ValueError, match="states of 6 heads or channels do not split over 4 devices; use fewer"):
        fake_placement(4).check_heads(spec, spec.page_layout("cpu"))
