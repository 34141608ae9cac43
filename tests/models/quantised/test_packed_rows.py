"""AWQ and GPTQ: values by the definition, from words that the test packs itself; parts that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import load_model
from kvjax.models.quantised.bits import unpack
from tests.models.quantised.checkpoints import PROJECTION, loaded_projection, write_quantised

OUTPUTS, INPUTS = 96, 64
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that stands in each four bits of a word, from the lowest on


def packed(numbers: np.ndarray, num_bits: int, axis: int) -> np.ndarray:  # int32
    """Each word the sum of its numbers times powers of two, the first number in the lowest bits."""
    per_word = 32 // num_bits
    moved = np.moveaxis(numbers, axis, -1).astype(np.int64)
    words = moved.reshape(*moved.shape[:-1], -1, per_word) @ (1 << np.arange(0, 32, num_bits)[:per_word])
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("num_bits", [1, 2, 3, 4, 5, 8])
def test_unpacking_is_the_reverse_of_packing(num_bits: int, axis: int) -> None:
    """Words of random bits where numbers fill them; with three and five bits the highest are zero."""
    per_word = 32 // num_bits
    numbers = np.random.default_rng(num_bits).integers(0, 1 << num_bits, (6 * per_word, 6 * per_word))
    words = packed(numbers, num_bits, axis)
    np.testing.assert_array_equal(unpack(words, num_bits, axis), numbers)
    np.testing.assert_array_equal(packed(unpack(words, num_bits, axis), num_bits, axis), words)


def drawn(num_bits: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers [in, out], zero points [groups, out] from 1 on, scales float16[groups, out]."""
    random = np.random.default_rng(num_bits)
    numbers = random.integers(0, 1 << num_bits, (INPUTS, OUTPUTS))
    zeros = random.integers(1, 1 << num_bits, (groups, OUTPUTS))
    return numbers, zeros, random.uniform(0.001, 0.02, (groups, OUTPUTS)).astype(np.float16)


def expected(
    numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: list[int]
) -> np.ndarray:  # [out, in]
    """(number - zero point) * scale in the dtype of scales, an element at a time."""
    weight = np.empty((OUTPUTS, INPUTS), np.float32)
    for output, i in np.ndindex(OUTPUTS, INPUTS):
        group = group_of[i]
        difference = np.float32(int(numbers[i, output]) - int(zeros[group, output]))
        weight[output, i] = (difference * np.float32(scales[group, output])).astype(scales.dtype)
    return weight


def awq_words(numbers: np.ndarray) -> np.ndarray:
    """Eight outputs a word, in the order of the kernel that reads them."""
    return packed(numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_PLACES].reshape(numbers.shape), 4, 1)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize("group_size", [16, 64, -1])
def test_awq_has_eight_outputs_a_word_in_its_own_order(tmp_path: Path, group_size: int) -> None:
    size = INPUTS if group_size == -1 else group_size
    numbers, zeros, scales = drawn(4, INPUTS // size)
    parts = {".qweight": awq_words(numbers), ".qzeros": awq_words(zeros), ".scales": scales}
    folder = write_quantised(tmp_path, AWQ | {"group_size": group_size}, parts)
    group_of = [i // size for i in range(INPUTS)]
    np.testing.assert_array_equal(loaded_projection(folder), expected(numbers, zeros, scales, group_of))


def test_awq_without_zero_points_is_about_eight(tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(4, 4)
    parts = {".qweight": awq_words(numbers), ".scales": scales}
    folder = write_quantised(tmp_path, AWQ | {"zero_point": False}, parts)
    weight = expected(numbers, np.full_like(zeros, 8), scales, [i // 16 for i in range(INPUTS)])
    np.testing.assert_array_equal(loaded_projection(folder), weight)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}


def gptq_parts(
    num_bits: int, form: str, group_of: list[int] | None, groups: int = 4
) -> tuple[dict[str, Any], np.ndarray]:
    """The stored tensors, and the weight that they stand for; zero points are stored less one in the first format."""
    numbers, zeros, scales = drawn(num_bits, groups)
    stored = zeros - 1 if form == "gptq" else zeros
    parts = {".qweight": packed(numbers, num_bits, 0), ".qzeros": packed(stored, num_bits, 1), ".scales": scales}
    if group_of is not None:
        parts[".g_idx"] = np.asarray(group_of, np.int32)
    return parts, expected(numbers, zeros, scales, group_of or [i * groups // INPUTS for i in range(INPUTS)])


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptq_has_several_inputs_a_word_and_groups_in_any_order(
    tmp_path: Path, form: str, num_bits: int, is_ordered: bool
) -> None:
    group_of = np.random.default_rng(3).permutation(np.arange(INPUTS) // 16).tolist() if is_ordered else None
    parts, weight = gptq_parts(num_bits, form, group_of)
    folder = write_quantised(tmp_path, GPTQ | {"bits": num_bits, "checkpoint_format": form}, parts)
    np.testing.assert_array_equal(loaded_projection(folder), weight)


def test_gptq_of_one_group_has_a_scale_for_each_output(tmp_path: Path) -> None:
    parts, weight = gptq_parts(4, "gptq", [0] * INPUTS, groups=1)
    folder = write_quantised(tmp_path, GPTQ | {"group_size": -1}, parts)
    np.testing.assert_array_equal(loaded_projection(folder), weight)


def test_a_zero_point_of_zero_is_stored_as_the_highest_number(tmp_path: Path) -> None:
    """One is added modulo 2 ** bits."""
    parts, _ = gptq_parts(4, "gptq", None)
    parts[".qzeros"] = np.full((4, OUTPUTS // 8), -1, np.int32)
    numbers, zeros, scales = drawn(4, 4)
    weight = expected(numbers, np.zeros_like(zeros), scales, [i // 16 for i in range(INPUTS)])
    np.testing.assert_array_equal(loaded_projection(write_quantised(tmp_path, GPTQ, parts)), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({".scales": None}, ".weight: expected a tensor with its scales beside .*qweight, got none"),
        ({".qweight": None}, ".weight: expected a tensor with its packed beside .*, got none"),
        ({".qzeros": None}, ".weight: expected a tensor with its zeros beside .*qweight, got none"),
        (
            {".scales": np.ones((3, OUTPUTS), np.float16)},
            r".weight: expected .*scales of shape \(4, 96\) beside .*qweight, got \(3, 96\)",
        ),
        (
            {".qzeros": np.zeros((4, 11), np.int32)},
            r".weight: expected .*qzeros of shape \(4, 12\) beside .*qweight, got \(4, 11\)",
        ),
        ({".qweight": np.zeros((8, OUTPUTS, 1), np.int32)}, ".weight: expected .*qweight of two dimensions, got shape"),
        ({".qweight": np.zeros((8, OUTPUTS), np.int64)}, ".weight: expected .*qweight in I32, got I64"),
        (
            {".g_idx": np.zeros(63, np.int32)},
            r".weight: expected .*g_idx of shape \(64,\) beside .*qweight, got \(63,\)",
        ),
        (
            {".g_idx": np.full(INPUTS, 4, np.int32)},
            r".g_idx: expected groups in \[0, 4\), got 4 at 0, one of 64 out of range",
        ),
        (
            {".g_idx": np.full(INPUTS, -1, np.int32)},
            r".g_idx: expected groups in \[0, 4\), got -1 at 0, one of 64 out of range",
        ),
        (
            {".scales": np.full((4, OUTPUTS), np.nan, np.float16)},
            ".scales: expected finite numbers as scale, got 384 of 384 that are NaN",
        ),
    ],
    ids=["scales", "weight", "zeros", "few", "narrow", "cube", "wide", "short", "beyond", "negative", "NaN"],
)
def test_parts_of_gptq_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, np.ndarray | None], message: str
) -> None:
    parts = {end: part for end, part in (gptq_parts(4, "gptq", None)[0] | changes).items() if part is not None}
    with pytest.raises(CheckpointError, match=re.escape(PROJECTION) + message):
        load_model(write_quantised(tmp_path, GPTQ, parts), "float32")


def test_parts_of_awq_that_do_not_fit_are_named(tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(4, 4)
    parts = {".qweight": awq_words(numbers), ".qzeros": awq_words(zeros), ".scales": scales[:3]}
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight: expected .*scales of shape \(4, 96\) .*, got \(3, 96\)"
    ):
        load_model(write_quantised(tmp_path, AWQ, parts))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ | {"version": "gemv"}, "expected AWQ of 4 bits, packed as 'gemm', got 4 bits and 'gemv': take"),
        (AWQ | {"bits": 8}, "expected AWQ of 4 bits, packed as 'gemm', got 8 bits and 'gemm'"),
        (
            GPTQ | {"bits": 3},
            "expected GPTQ of 2, 4 or 8 bits in the format gptq or gptq_v2, .*, got 3 bits, 'gptq' and 0",
        ),
        (GPTQ | {"checkpoint_format": "marlin"}, "expected GPTQ .*, got 4 bits, 'marlin' and 0 modules"),
        (
            GPTQ | {"dynamic": {"+:.*mlp.*": {"bits": 8}}},
            "expected GPTQ .*, got 4 bits, 'gptq' and 1 modules of their own",
        ),
    ],
)
def test_forms_that_are_not_read_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        load_model(write_quantised(tmp_path, config, {}))


@pytest.mark.parametrize("config", [AWQ, GPTQ])
@pytest.mark.parametrize("size", [0, -2, "128", 1.5])
def test_group_sizes_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any], size: Any) -> None:
    with pytest.raises(ConfigError, match="expected 'group_size' as a positive integer or -1, got"):
        load_model(write_quantised(tmp_path, config | {"group_size": size}, {}))
