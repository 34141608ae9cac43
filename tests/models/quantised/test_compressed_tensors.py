"""compressed-tensors: values by the definition for each format, groups by their targets, parts that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import load_model
from kvjax.models.quantised.bits import float4
from tests.models.quantised.checkpoints import PROJECTION, loaded_projection, write_quantised

ROWS, COLUMNS = 96, 64
RANDOM = np.random.default_rng(0)
INT8 = RANDOM.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
CHANNELS = RANDOM.uniform(1e-3, 2e-3, (ROWS, 1)).astype(jnp.bfloat16)


def config(weights: dict[str, Any], targets: tuple[str, ...] = ("Linear",), **changes: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": {"type": "int", "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


def packed(numbers: np.ndarray, num_bits: int) -> np.ndarray:  # int[rows, n] -> int32[rows, words]
    """32 // bits numbers a word, the first in the lowest bits; the last word is filled up with zeros."""
    per_word = 32 // num_bits
    padded = np.pad(numbers.astype(np.int64), ((0, 0), (0, -numbers.shape[1] % per_word)))
    words = padded.reshape(len(numbers), -1, per_word) @ (1 << (np.arange(per_word) * num_bits))
    return words.astype(np.uint32).view(np.int32)


def test_a_byte_is_its_number_less_the_zero_point_times_the_scale_of_its_row(tmp_path: Path) -> None:
    """Rounded to the dtype of the scales, as the package computes it."""
    zero = RANDOM.integers(-8, 8, (ROWS, 1)).astype(np.int8)
    parts = {".weight": INT8, ".weight_scale": CHANNELS, ".weight_zero_point": zero}
    folder = write_quantised(tmp_path, config({"strategy": "channel", "symmetric": False}), parts)
    difference = INT8.astype(np.float32) - zero
    np.testing.assert_array_equal(loaded_projection(folder), (difference * CHANNELS).astype(jnp.bfloat16))


@pytest.mark.parametrize("num_bits", [3, 4, 6, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_packed_numbers_are_shifted_by_half_their_range(tmp_path: Path, num_bits: int, is_symmetric: bool) -> None:
    """Zero points are packed along rows; with three and six bits words are not full."""
    half = 1 << (num_bits - 1)
    numbers = RANDOM.integers(-half, half, (ROWS, COLUMNS))
    zeros = RANDOM.integers(-half, half, (ROWS, 4))
    scale = RANDOM.uniform(1e-3, 2e-2, (ROWS, 4)).astype(np.float32)
    parts = {
        ".weight_packed": packed(numbers + half, num_bits),
        ".weight_scale": scale,
        ".weight_shape": np.asarray([ROWS, COLUMNS]),
    }
    if not is_symmetric:
        parts[".weight_zero_point"] = packed(zeros.T + half, num_bits).T
    weights = {"num_bits": num_bits, "strategy": "group", "group_size": 16, "symmetric": is_symmetric}
    folder = write_quantised(tmp_path, config(weights), parts)
    zero_of = np.repeat(zeros, 16, axis=1) if not is_symmetric else 0
    np.testing.assert_array_equal(
        loaded_projection(folder), (numbers - zero_of).astype(np.float32) * np.repeat(scale, 16, axis=1)
    )


def test_columns_may_be_in_groups_in_any_order(tmp_path: Path) -> None:
    """Activation order: `weight_g_idx` has the group of each column."""
    numbers, groups = RANDOM.integers(-8, 8, (ROWS, COLUMNS)), RANDOM.permutation(np.arange(COLUMNS) // 16)
    scale = RANDOM.uniform(1e-3, 2e-2, (ROWS, 4)).astype(np.float32)
    parts = {
        ".weight_packed": packed(numbers + 8, 4),
        ".weight_scale": scale,
        ".weight_shape": np.asarray([ROWS, COLUMNS]),
        ".weight_g_idx": groups.astype(np.int32),
    }
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "group"}
    folder = write_quantised(tmp_path, config(weights), parts)
    np.testing.assert_array_equal(loaded_projection(folder), numbers.astype(np.float32) * scale[:, groups])


FLOAT8 = RANDOM.choice([b for b in range(256) if b & 0x7F != 0x7F], (ROWS, COLUMNS)).astype(np.uint8)


@pytest.mark.parametrize(
    ("weights", "shape", "blocks"),
    [
        ({"strategy": "tensor"}, (1,), (96, 64)),
        ({"strategy": "channel"}, (96, 1), (1, 64)),
        ({"strategy": "block", "block_structure": [40, 24]}, (3, 3), (40, 24)),
        ({"strategy": "group", "group_size": 32}, (96, 2), (1, 32)),
    ],
)
def test_floats_of_eight_bits_are_scaled_by_tensor_row_block_or_group(
    tmp_path: Path, weights: dict[str, Any], shape: tuple[int, ...], blocks: tuple[int, int]
) -> None:
    scale = RANDOM.uniform(1e-3, 2e-3, shape).astype(np.float32)
    parts = {".weight": FLOAT8.view(jnp.float8_e4m3fn), ".weight_scale": scale, ".input_scale": scale}
    folder = write_quantised(tmp_path, config({"type": "float"} | weights), parts)
    rows, columns = np.arange(ROWS) // blocks[0], np.arange(COLUMNS) // blocks[1]
    scale_of = scale.reshape(rows[-1] + 1, columns[-1] + 1)[rows][:, columns]
    numbers = FLOAT8.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(loaded_projection(folder), numbers * scale_of)


@pytest.mark.parametrize("form", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"])
def test_floats_of_four_bits_have_powers_of_two_or_scales_over_a_common_one(tmp_path: Path, form: str) -> None:
    pairs = RANDOM.integers(0, 256, (ROWS, COLUMNS // 2), np.uint8)
    is_mx = form.startswith("mx")
    size = 32 if is_mx else 16
    bits = RANDOM.integers(100, 120, (ROWS, COLUMNS // size), np.uint8)
    scale = bits if is_mx else bits.view(jnp.float8_e4m3fn)
    parts = {".weight_packed": pairs, ".weight_scale": scale}
    if not is_mx:
        parts[".weight_global_scale"] = np.asarray([300.0], np.float32)
    weights = {"num_bits": 4, "type": "float", "strategy": "group" if is_mx else "tensor_group", "group_size": size}
    folder = write_quantised(tmp_path, config(weights, format=form), parts)
    floats = np.exp2(bits.astype(np.float32) - 127) if is_mx else scale.astype(np.float32) / np.float32(300)
    np.testing.assert_array_equal(loaded_projection(folder), float4(pairs) * np.repeat(floats, size, axis=1))


def test_the_closest_target_says_how_a_module_is_quantised(tmp_path: Path) -> None:
    """A name before a pattern, a pattern before a class."""
    groups = {
        name: {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}}
        for name, target, bits in (("a", "Linear", 2), ("b", "re:.*up_proj$", 4), ("c", PROJECTION, 8))
    }
    parts = {".weight_packed": packed(INT8.astype(np.int64) + 128, 8), ".weight_scale": CHANNELS}
    for missing, is_read in (("a", True), ("c", False)):
        left = {name: group for name, group in groups.items() if name != missing}
        folder = write_quantised(tmp_path / missing, config({}, config_groups=left), parts)
        if is_read:
            weight = (INT8.astype(np.float32) * CHANNELS).astype(jnp.bfloat16)
            np.testing.assert_array_equal(loaded_projection(folder), weight)
        else:
            with pytest.raises(CheckpointError, match=r"up_proj\.weight: expected shape \(96, 64\), got \(96, 128\)"):
                load_model(folder)


PACKED = packed(INT8.astype(np.int64) + 128, 8)


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ({".weight_packed": PACKED}, {}, ".weight: expected a tensor with its scale beside .*weight_packed, got none"),
        ({".weight_scale": CHANNELS}, {}, ".weight: expected a tensor with its weight beside .*weight_scale, got none"),
        (
            {".weight": INT8, ".weight_scale": CHANNELS[:48]},
            {},
            r".weight: expected .*weight_scale of shape \(96, 1\), for blocks of 1 x 64 in \(96, 64\), got \(48, 1\)",
        ),
        (
            {".weight": INT8, ".weight_scale": CHANNELS},
            {"symmetric": False},
            ".weight: expected a tensor with its zero_point beside .*weight_scale, got none",
        ),
        (
            {".weight": INT8, ".weight_scale": CHANNELS, ".weight_zero_point": np.zeros((96, 2), np.int8)},
            {"symmetric": False},
            r".weight: expected .*weight_zero_point of shape \(96, 1\) beside .*weight_scale, got \(96, 2\)",
        ),
        (
            {".weight_packed": PACKED, ".weight_scale": CHANNELS, ".weight_shape": np.asarray([96, 100])},
            {},
            r".weight: expected .*weight_shape of a matrix that \(96, 16\) words of 4 numbers hold, got \(96, 100\)",
        ),
        (
            {".weight_packed": PACKED, ".weight_scale": CHANNELS, ".weight_shape": np.asarray([96])},
            {},
            r".weight: expected .*weight_shape of shape \(2,\) beside .*weight_packed, got \(1,\)",
        ),
        (
            {".weight_packed": PACKED, ".weight_scale": CHANNELS, ".weight_g_idx": np.ones(64, np.int32)},
            {},
            r".weight_g_idx: expected groups in \[0, 1\), got 1 at 0, one of 64 out of range",
        ),
        (
            {".weight": INT8, ".weight_scale": CHANNELS * np.nan},
            {},
            ".weight_scale: expected finite numbers as scale, got 96 of 96 that are NaN",
        ),
        (
            {".weight": INT8.astype(np.float32), ".weight_scale": CHANNELS},
            {},
            ".weight: expected .*weight in I8 or F8_E4M3 or F8_E5M2, got F32",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, parts: dict[str, np.ndarray], weights: dict[str, Any], message: str
) -> None:
    folder = write_quantised(tmp_path, config({"num_bits": 8, "strategy": "channel"} | weights), parts)
    with pytest.raises(CheckpointError, match=re.escape(PROJECTION) + message):
        load_model(folder, "float32")


def test_a_quantised_module_that_no_group_targets_is_named(tmp_path: Path) -> None:
    folder = write_quantised(
        tmp_path, config({}, targets=("re:.*down_proj",)), {".weight": INT8, ".weight_scale": CHANNELS}
    )
    with pytest.raises(CheckpointError, match=r"expected model\.layers\.1\.mlp\.up_proj among the targets of a group"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": ["W8A8"]}, "expected 'config_groups' as an object of objects"),
        ({"config_groups": {"W8A8": ["Linear"]}}, "expected 'config_groups' as an object of objects"),
        ({"sparsity_config": "sparse"}, "expected 'sparsity_config' and 'transform_config' as objects"),
        ({"config_groups": {"a": {"weights": {}}}}, "expected a group with an object 'weights' and a list 'targets'"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(write_quantised(tmp_path, config({}) | changes, {}))


@pytest.mark.parametrize(
    ("weights", "targets", "message"),
    [
        ({"num_bits": 16}, ("Linear",), r"expected 'num_bits' in \[1, 8\], got 16"),
        ({"strategy": "head"}, ("Linear",), "expected 'strategy' among tensor, .*, got 'head'"),
        ({"strategy": "group"}, ("Linear",), "expected 'group_size' as a positive integer, got None"),
        ({"strategy": "block", "block_structure": [8]}, ("Linear",), "expected 'block_structure' as two positive"),
        ({}, ("re:(",), r"expected 'targets' of patterns that can be, got 're:\('"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, weights: dict[str, Any], targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(write_quantised(tmp_path, config(weights, targets), {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, "expected weights in one of the formats .* of compressed-tensors, got 'marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "expected weights that are quantised only, got a spars"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "expected weights that are quantised only, got a spars"),
    ],
)
def test_forms_that_are_not_read_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        load_model(write_quantised(tmp_path, config({}) | changes, {}))
