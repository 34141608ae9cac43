"""Eight-bit floats in blocks: values by the definition, numbers of E4M3 by their bits, parts that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import load_model
from kvjax.models.quantised.bits import float4, float8, power_of_two
from tests.models.golden_models import model_folder
from tests.models.quantised.checkpoints import PROJECTION, loaded_projection, write_quantised

FINITE = np.asarray([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 24]} | changes


def drawn(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:  # float8_e4m3fn
    return np.random.default_rng(seed).choice(FINITE, shape).view(jnp.float8_e4m3fn)


def number_of(byte: int) -> float:
    """E4M3 by its definition: a sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_byte_is_the_number_of_its_bits() -> None:
    expected = [number_of(byte) for byte in FINITE.tolist()]
    np.testing.assert_array_equal(float8(FINITE.view(jnp.float8_e4m3fn)), np.asarray(expected, np.float32))
    assert np.isnan(float8(np.asarray([0x7F, 0xFF], np.uint8).view(jnp.float8_e4m3fn))).all()


def test_four_bits_are_two_numbers_a_byte_low_bits_first() -> None:
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa."""
    expected = [
        (-1.0 if four & 8 else 1.0)
        * (0.5 * (four & 1) if four & 6 == 0 else (1 + 0.5 * (four & 1)) * 2.0 ** ((four >> 1 & 3) - 1))
        for four in range(16)
    ]
    bytes_of = np.arange(256, dtype=np.uint8)
    pairs = float4(bytes_of[:, None])
    np.testing.assert_array_equal(pairs[:, 0], np.asarray(expected, np.float32)[bytes_of & 15])
    np.testing.assert_array_equal(pairs[:, 1], np.asarray(expected, np.float32)[bytes_of >> 4])


def test_scales_of_eight_bits_are_powers_of_two() -> None:
    exponents = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(power_of_two(exponents), [np.float32(2.0 ** (e - 127)) for e in range(255)])
    assert np.isnan(power_of_two(np.asarray([255], np.uint8))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_an_element_is_its_number_times_the_scale_of_its_block(tmp_path: Path, dtype: str, scale_dtype: str) -> None:
    """Blocks of 40 x 24 in a matrix of 96 x 64: the last ones are cut off."""
    weight = drawn((96, 64))
    scale = np.random.default_rng(1).uniform(1e-3, 2e-2, (3, 3)).astype(jnp.dtype(scale_dtype))
    folder = write_quantised(tmp_path, fp8(), {".weight": weight, ".weight_scale_inv": scale})
    expected = np.empty((96, 64), np.float32)
    for row, column in np.ndindex(96, 64):
        number = np.float32(number_of(int(weight[row, column].view(np.uint8))))
        expected[row, column] = number * np.float32(scale[row // 40, column // 24])
    np.testing.assert_array_equal(loaded_projection(folder, dtype), expected.astype(jnp.dtype(dtype)))


def test_one_scale_is_for_all_of_a_tensor_where_the_config_is_silent_of_blocks(tmp_path: Path) -> None:
    """As AutoFP8 writes it."""
    parts = {".weight": drawn((96, 64)), ".weight_scale": np.float32(0.0123)}
    folder = write_quantised(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, parts)
    np.testing.assert_array_equal(loaded_projection(folder), drawn((96, 64)).astype(np.float32) * np.float32(0.0123))


@pytest.mark.parametrize("end", [".weight_scale_inv", ".weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_may_be_for_all_of_a_tensor(tmp_path: Path, end: str, shape: tuple[int, ...]) -> None:
    """As checkpoints with static activations have it, whose scales of activations are not used."""
    weight, scale = drawn((96, 64)), np.full(shape, 0.0123, np.float32)
    parts = {".weight": weight, end: scale, ".activation_scale": scale, ".input_scale": scale}
    folder = write_quantised(tmp_path, fp8(weight_block_size=None), parts)
    np.testing.assert_array_equal(loaded_projection(folder), weight.astype(np.float32) * np.float32(0.0123))


@pytest.mark.parametrize("dtype", [jnp.float8_e8m0fnu, np.uint8])
def test_four_bit_floats_have_a_power_of_two_for_32_of_a_row(tmp_path: Path, dtype: Any) -> None:
    """Experts of DeepSeek V4: two numbers a byte, `scale` beside `weight`."""
    random = np.random.default_rng(2)
    weight = random.integers(0, 256, (96, 32), np.uint8)
    exponents = random.integers(110, 130, (96, 2), np.uint8)
    parts = {".weight": weight.view(np.int8), ".scale": exponents.view(dtype)}
    numbers = float4(weight).reshape(96, 2, 32) * np.exp2(exponents.astype(np.float32) - 127)[:, :, None]
    np.testing.assert_array_equal(loaded_projection(write_quantised(tmp_path, fp8(), parts)), numbers.reshape(96, 64))


SCALE = np.ones((3, 3), np.float32)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({".weight": drawn((96, 64))}, ".weight: expected one of F64, .*, got F8_E4M3 without scales beside it"),
        ({".weight_scale_inv": SCALE}, r".weight: expected shape \(96, 64\), got no such tensor"),
        (
            {".weight": drawn((96, 64)), ".weight_scale_inv": SCALE[:2]},
            r".weight: expected .*up_proj.weight_scale_inv of shape \(3, 3\), for blocks of 40 x 24 .*, got \(2, 3\)",
        ),
        (
            {".weight": drawn((96, 64)), ".weight_scale_inv": SCALE[0, 0]},
            r".weight: expected .*up_proj.weight_scale_inv of shape \(3, 3\), for .*, got \(\)",
        ),
        (
            {".weight": drawn((96, 48)), ".weight_scale_inv": SCALE[:, :2]},
            r".weight: expected shape \(96, 64\), got \(96, 48\)",
        ),
        (
            {".weight": np.ones((96, 64), np.float32), ".weight_scale_inv": SCALE},
            r".weight: expected .*up_proj.weight in F8_E4M3 or F8_E5M2 or I8 or U8, got F32",
        ),
        (
            {".weight": drawn((96,)), ".weight_scale_inv": SCALE},
            r".weight: expected .*up_proj.weight of two dimensions or more, got shape \(96,\)",
        ),
        (
            {".weight": drawn((96, 64)), ".weight_scale_inv": SCALE.astype(np.int32)},
            r".weight: expected .*up_proj.weight_scale_inv in F32 or .*, got I32",
        ),
    ],
    ids=["no scale", "no weight", "few scales", "one scale", "narrow", "no float8", "vector", "integer scale"],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, parts: dict[str, np.ndarray], message: str) -> None:
    folder = write_quantised(tmp_path, fp8(), parts)
    with pytest.raises(CheckpointError, match=re.escape(PROJECTION) + message):
        load_model(folder, "float32")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, bad: float) -> None:
    scale = SCALE.copy()
    scale[1, 2] = bad
    folder = write_quantised(tmp_path, fp8(), {".weight": drawn((96, 64)), ".weight_scale_inv": scale})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight_scale_inv: expected finite numbers as scale, got 1 of 9"
    ):
        load_model(folder, "float32")


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    weight = drawn((96, 64)).copy()
    weight.view(np.uint8)[5, 6] = 0x7F
    folder = write_quantised(tmp_path, fp8(), {".weight": weight, ".weight_scale_inv": SCALE})
    with pytest.raises(CheckpointError, match=r"expected finite numbers in .*up_proj\.weight, got 1 of 6144"):
        load_model(folder, "float32")


@pytest.mark.parametrize("block", [[128], [0, 128], "128x128", [128, 128.0], [True, 128]])
def test_blocks_that_cannot_be_are_refused(tmp_path: Path, block: Any) -> None:
    folder = write_quantised(tmp_path, fp8(weight_block_size=block), {})
    with pytest.raises(
        ConfigError, match=r"config\.json: expected 'weight_block_size' as two positive integers or null"
    ):
        load_model(folder, "float32")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "jamba", "phi3"])
def test_every_matrix_of_a_model_may_be_quantised(tmp_path: Path, name: str) -> None:
    """Those that several parameters share, that experts have, and that have other names in files."""
    tensors = load_file(model_folder(name) / "model.safetensors")
    matrices = [
        key for key, x in tensors.items() if x.ndim == 2 and re.search(r"(proj|w[123]|wq_[ab]|wkv)\.weight$", key)
    ]
    assert len(matrices) > 10
    plain, parts = dict(tensors), dict(tensors)
    for i, key in enumerate(matrices):
        values, scale = tensors[key].astype(jnp.float8_e4m3fn), np.full((1, 1), 2.0 ** -(i % 3), np.float32)
        parts |= {key: values, f"{key}_scale_inv" if i % 2 else key.removesuffix("weight") + "scale": scale}
        plain[key] = (values.astype(np.float32) * scale).astype(jnp.bfloat16)
    config = json.loads((model_folder(name) / "config.json").read_text())
    for part, written, changes in (
        ("plain", plain, {}),
        ("fp8", parts, {"quantization_config": fp8(weight_block_size=[999, 999])}),
    ):
        (tmp_path / part).mkdir()
        save_file(written, tmp_path / part / "model.safetensors")
        (tmp_path / part / "config.json").write_text(json.dumps(config | changes))
    loaded = (nnx.state(load_model(tmp_path / part, "bfloat16").module) for part in ("plain", "fp8"))
    jax.tree.map(np.testing.assert_array_equal, *loaded)
