"""Four-bit experts of GPT-OSS: values by the definition, parts that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.errors import CheckpointError
from kvjax.models import load_model
from tests.models.quantised.checkpoints import EXPERTS, write_quantised_experts

MXFP4 = {"quant_method": "mxfp4"}
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of E2M1, by the bits below the sign
BLOCKS = np.random.default_rng(0).integers(0, 256, (8, 64, 1, 16), np.uint8)
SCALES = np.random.default_rng(1).integers(118, 130, (8, 64, 1), np.uint8)


def number_of(four: int) -> float:
    return -NUMBERS[four & 7] if four & 8 else NUMBERS[four]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_input_of_an_expert_is_its_four_bits_times_the_power_of_two_of_its_block(tmp_path: Path, dtype: str) -> None:
    """Exact in both dtypes."""
    folder = write_quantised_experts(tmp_path, MXFP4, {"_blocks": BLOCKS, "_scales": SCALES})
    module: Any = load_model(folder, dtype).module
    got = np.asarray(module.layers[1].mlp.experts.gate_up_proj[...], np.float32)
    assert got.shape == (8, 32, 64)
    for expert, i, output in np.ndindex(8, 32, 64):
        byte = int(BLOCKS[expert, output, 0, i // 2])
        expected = number_of(byte >> 4 if i % 2 else byte & 15) * 2.0 ** (int(SCALES[expert, output, 0]) - 127)
        assert got[expert, i, output] == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"_blocks": BLOCKS}, ": expected a tensor with its scales beside .*gate_up_proj_blocks, got none"),
        ({"_scales": SCALES}, ": expected a tensor with its blocks beside .*gate_up_proj_scales, got none"),
        (
            {"_blocks": BLOCKS, "_scales": SCALES[:, :32]},
            r": expected .*_scales of shape \(8, 64, 1\) beside .*_blocks, got \(8, 32, 1\)",
        ),
        (
            {"_blocks": BLOCKS[:, :32], "_scales": SCALES[:, :32]},
            r": expected shape \(8, 32, 64\), got \(8, 32, 32\)",
        ),
        (
            {"_blocks": BLOCKS[..., :8], "_scales": SCALES},
            r": expected .*_blocks of four dimensions, the last 16, got shape \(8, 64, 1, 8\)",
        ),
        ({"_blocks": BLOCKS.astype(np.int32), "_scales": SCALES}, ": expected .*_blocks in U8, got I32"),
        (
            {"_blocks": BLOCKS, "_scales": SCALES, "": np.zeros((8, 32, 64), np.float32)},
            ": expected it plain or quantised, got both it and .*_blocks",
        ),
        (
            {"_blocks": BLOCKS, "_scales": np.full_like(SCALES, 255)},
            "_scales: expected finite numbers as scale, got 512 of 512 that are NaN",
        ),
    ],
    ids=["no scales", "no blocks", "few scales", "few outputs", "short blocks", "wide blocks", "both", "NaN"],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, parts: dict[str, np.ndarray], message: str) -> None:
    folder = write_quantised_experts(tmp_path, MXFP4, parts)
    with pytest.raises(CheckpointError, match=re.escape(EXPERTS) + message):
        load_model(folder, "float32")
