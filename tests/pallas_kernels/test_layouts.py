"""Shapes, bytes and axes of pages, by dtype and platform."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.layouts import (
    DIM_AXIS,
    HEAD_AXIS,
    KV_CACHE_DTYPES,
    LANE_AXIS,
    PACK_AXIS,
    TOKEN_AXIS,
    attention_layout,
    cdiv,
    dtype_bits,
    latent_layout,
    recurrent_layout,
)

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


def test_dtypes_are_those_of_jax() -> None:
    """Every name is a jax dtype of as many bits."""
    assert sorted(KV_CACHE_DTYPES) == sorted(BYTES)
    for name in KV_CACHE_DTYPES:
        assert dtype_bits(name) == 8 * BYTES[name] == 8 * jnp.dtype(name).itemsize


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda", "rocm"])
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_split_pages(dtype: str, platform: str) -> None:
    """K and V apart, each head at its own dimension, no padding."""
    layout = attention_layout(num_kv_heads=3, head_dim=80, head_dim_v=48, page_size=16, dtype=dtype, platform=platform)
    k, v = layout.arrays
    assert (layout.kind, layout.page_size, k.name, v.name) == ("split", 16, "k", "v")
    assert k.shape(7) == (7, 16, 3, 80)
    assert v.shape(7) == (7, 16, 3, 48)
    assert k.axes == v.axes == (TOKEN_AXIS, HEAD_AXIS, DIM_AXIS)
    assert k.page_bytes == 16 * 3 * 80 * BYTES[dtype]
    assert layout.page_bytes == 16 * 3 * (80 + 48) * BYTES[dtype]


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "rows"),
    [
        ("float32", 1, (2, 1)),
        ("float32", 3, (6, 1)),
        ("bfloat16", 1, (1, 2)),
        ("bfloat16", 8, (8, 2)),
        ("float16", 3, (3, 2)),
        ("float8_e5m2", 2, (1, 4)),
        ("int8", 3, (2, 4)),
    ],
)
@pytest.mark.parametrize(("head_dim", "pieces"), [(64, 1), (128, 1), (192, 2), (512, 4)])
def test_packed_pages(dtype: str, num_kv_heads: int, rows: tuple[int, int], head_dim: int, pieces: int) -> None:
    """Rows of 128 lanes: K0, V0, K1, V1, ... in 32-bit words, each as many rows as a head needs; all bytes count."""
    layout = attention_layout(num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=8, dtype=dtype, platform="tpu")
    (kv,) = layout.arrays
    assert (layout.kind, kv.name) == ("packed", "kv")
    assert kv.shape(5) == (5, 8, rows[0] * pieces, rows[1], 128)
    assert kv.axes == (TOKEN_AXIS, HEAD_AXIS, PACK_AXIS, LANE_AXIS)
    assert layout.page_bytes == math.prod((8, *rows, 128 * pieces)) * BYTES[dtype]
    assert rows[1] * dtype_bits(dtype) == 32
    assert 2 * num_kv_heads <= math.prod(rows) < 2 * num_kv_heads + rows[1]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(("num_kv_heads", "num_shards"), [(1, 1), (8, 8), (3, 3)])
def test_two_tokens_share_the_words_of_one_head(dtype: str, num_kv_heads: int, num_shards: int) -> None:
    """Where a device has one head of 8 bits, its pages take half of bfloat16's bytes."""
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": 128, "page_size": 16, "platform": "tpu"}
    layout = attention_layout(**sizes, dtype=dtype, num_shards=num_shards)
    (kv,) = layout.arrays
    assert kv.shape(5) == (5, 8, num_kv_heads, 4, 128)
    assert kv.axes == (TOKEN_AXIS, HEAD_AXIS, PACK_AXIS, LANE_AXIS)
    assert (layout.kind, layout.page_size, layout.tokens_per_row) == ("packed", 16, 2)
    assert layout.page_bytes == 16 * 256 * num_kv_heads
    assert 2 * layout.page_bytes == attention_layout(**sizes, dtype="bfloat16", num_shards=num_shards).page_bytes


def test_other_pages_do_not_depend_on_shards() -> None:
    """Two heads of 8 bits or one of 16 fill words; heads that do not split stay as on one device."""
    for heads, shards, dtype in ((8, 4, "int8"), (8, 8, "bfloat16"), (4, 4, "float32"), (6, 4, "int8")):
        sizes = {"num_kv_heads": heads, "head_dim": 64, "page_size": 8, "dtype": dtype, "platform": "tpu"}
        layout = attention_layout(**sizes, num_shards=shards)
        assert layout == attention_layout(**sizes)
        assert layout.tokens_per_row == 1
    split = {"num_kv_heads": 4, "head_dim": 64, "page_size": 7, "dtype": "int8"}
    assert attention_layout(**split, num_shards=4) == attention_layout(**split)


def test_a_page_does_not_end_within_a_row() -> None:
    with pytest.raises(NotImplementedError, match=r"one KV head of int8 hold 2 tokens a row .* multiple of 2, got 5"):
        attention_layout(num_kv_heads=1, head_dim=64, page_size=5, dtype="int8", platform="tpu")
    with pytest.raises(ValueError, match="expected num_shards >= 1, got 0"):
        attention_layout(num_kv_heads=1, head_dim=64, page_size=8, dtype="int8", num_shards=0)


def test_equal_layouts_are_equal_values() -> None:
    """Layouts are frozen and hashable: equal ones may share a pool."""
    sizes = {"num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"}
    assert attention_layout(**sizes) == attention_layout(**sizes, head_dim_v=64, platform="gpu")
    assert len({attention_layout(**sizes), attention_layout(**sizes), attention_layout(**sizes, platform="tpu")}) == 2


def test_a_column_of_arrays_may_be_sharded_by_heads() -> None:
    """Every array names a head axis, so that logical axes can be mapped to mesh axes."""
    for platform in ("cpu", "tpu"):
        layout = attention_layout(num_kv_heads=4, head_dim=64, page_size=16, dtype="bfloat16", platform=platform)
        for array in layout.arrays:
            assert len(array.axes) == len(array.page_shape)
            assert array.page_shape[array.axes.index(HEAD_AXIS)] == 4


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "head_dim_v", "page_size"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "page_size": 16} | {name: 0}
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        attention_layout(**sizes, dtype="bfloat16")


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match=r"expected a KV-cache dtype out of .*, got 'int4'"):
        dtype_bits("int4")


def test_unknown_platform() -> None:
    with pytest.raises(ValueError, match="expected platform 'cpu', 'gpu' or 'tpu', got 'metal'"):
        attention_layout(num_kv_heads=1, head_dim=64, page_size=16, dtype="int8", platform="metal")


def test_tpu_rows_hold_k_and_v_of_one_size() -> None:
    with pytest.raises(NotImplementedError, match="TPU pages need equal K and V dimensions, got 64 and 32"):
        attention_layout(num_kv_heads=1, head_dim=64, head_dim_v=32, page_size=16, dtype="int8", platform="tpu")


def test_rounding_up() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_importing_loads_neither_jax_nor_numpy() -> None:
    """The host core and the planner import this module."""
    program = "import sys, pallas_kernels.layouts; print(sorted({'jax', 'jaxlib', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("platform", "dtype", "shape"),
    [
        ("cpu", "bfloat16", (16, 576)),
        ("gpu", "float8_e4m3fn", (16, 576)),
        ("tpu", "bfloat16", (8, 5, 2, 128)),
        ("tpu", "float8_e4m3fn", (4, 5, 4, 128)),
    ],
)
def test_latent_pages(platform: str, dtype: str, shape: tuple[int, ...]) -> None:
    layout = latent_layout(head_dim=576, page_size=16, dtype=dtype, platform=platform)
    [array] = layout.arrays
    assert (layout.kind, layout.page_size, array.page_shape) == ("latent", 16, shape)
    assert len(array.axes) == len(shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 0}, "expected head_dim >= 1, got 0"),
        ({"page_size": 0}, "expected page_size >= 1, got 0"),
        ({"dtype": "int3"}, "expected a KV-cache dtype"),
        ({"platform": "abacus"}, "expected platform 'cpu', 'gpu' or 'tpu', got 'abacus'"),
    ],
)
def test_latent_pages_that_can_not_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        latent_layout(**({"head_dim": 8, "page_size": 4, "dtype": "float32"} | options))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda", "rocm", "tpu"])
def test_a_page_of_a_recurrent_layer_is_one_state(platform: str) -> None:
    layout = recurrent_layout(shapes=((4, 3), (2, 5, 7)), dtypes=("bfloat16", "float32"), platform=platform)
    assert (layout.kind, layout.page_size) == ("recurrent", 1)
    assert [(array.page_shape, array.dtype) for array in layout.arrays] == [
        ((4, 3), "bfloat16"),
        ((2, 5, 7), "float32"),
    ]
    assert layout.page_bytes == 4 * 3 * 2 + 2 * 5 * 7 * 4


@pytest.mark.parametrize(("platform", "sizes"), [("cpu", (96, 192)), ("gpu", (96, 192)), ("tpu", (128, 256))])
def test_marked_states_are_whole_lanes_behind_their_heads_on_tpu(platform: str, sizes: tuple[int, int]) -> None:
    """Those that are so anyway keep their shapes; what is not marked is as long as it is."""
    shapes = ((5, 3), (5, 96, 192), (7, 5, 96), (2, 128, 256))
    axes, dtypes = (0, 0, 1, 0), ("bfloat16",) * 4
    options = {"dtypes": dtypes, "head_axes": axes, "lane_arrays": (1, 2, 3), "platform": platform}
    layout = recurrent_layout(shapes=shapes, **options)
    found = [array.page_shape for array in layout.arrays]
    assert found == [(5, 3), (5, *sizes), (7, 5, sizes[0]), (2, 128, 256)]
    assert [array.axes.index(HEAD_AXIS) for array in layout.arrays] == list(axes)
    assert layout.platform == ("tpu" if platform == "tpu" else "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lane_arrays": (1,)}, r"expected lane_arrays among \(\(2, 3\),\) .* got \(1,\)"),
        ({"lane_arrays": (0,), "head_axes": (1,)}, r"with dimensions behind \(1,\), got \(0,\)"),
        ({"shapes": ()}, "expected a dtype for each of one or more shapes"),
        ({"dtypes": ()}, "expected a dtype for each of one or more shapes"),
        ({"shapes": ((2, 0),)}, "expected sizes >= 1 in shapes"),
        ({"dtypes": ("int3",)}, "expected a KV-cache dtype"),
        ({"platform": "abacus"}, "expected platform 'cpu', 'gpu' or 'tpu', got 'abacus'"),
    ],
)
def test_recurrent_layouts_that_can_not_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recurrent_layout(**({"shapes": ((2, 3),), "dtypes": ("float32",)} | options))
