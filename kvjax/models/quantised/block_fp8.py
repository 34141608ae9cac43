"""Eight-bit floats with a scale for each block of a matrix, or one for all of it.

Flow:    weight float8[out, in], weight_scale_inv[out / rows, in / columns] -> [BlockFp8] -> weight * scale
Source:  DeepSeek V3's report (arXiv 2412.19437, section 3.3.2) and transformers' integrations/finegrained_fp8.py

Despite its name `weight_scale_inv` is multiplied by. The last block of a row or column may be cut off. DeepSeek V4 has
`scale` beside `weight`, and experts of two four-bit floats a byte whose blocks are 32 numbers of a row. Checkpoints of
AutoFP8 have one `weight_scale`. Scales are floats, or powers of two by their exponents (E8M0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvjax.errors import ConfigError
from kvjax.models.quantised.bits import float4, float8
from kvjax.models.quantised.grid import Grid, block_of, read_scale
from kvjax.models.quantised.scheme import Layout, Misfit, Parts, Scheme, Shape, part_of
from kvjax.models.tensor_files import StoredTensor

FLOAT8 = ("F8_E4M3", "F8_E5M2")
FLOAT4 = ("I8", "U8")  # two a byte
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
FLOAT4_BLOCK = (1, 32)
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class ScaledFloats(Layout):
    """Floats of eight or four bits, [..., out, in], and a scale for each block of the last two dimensions."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    shape: Shape

    def dequantise(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The product."""
        rows, columns = self.shape[-2:]
        grid = Grid(block_of(rows, self.block[0]), block_of(columns, self.block[1]))
        scales = read_scale(self.scale).reshape(-1, -(-rows // self.block[0]), -(-columns // self.block[1]))
        stored = self.weight.read()
        matrices = stored.reshape(-1, *stored.shape[-2:])
        if len(matrices) == 1:
            return self._product(grid, matrices[0], scales[0], dtype).reshape(self.shape)
        out = np.empty((len(matrices), rows, columns), dtype)
        for i, matrix in enumerate(matrices):
            out[i] = self._product(grid, matrix, scales[i], dtype)
        return out.reshape(self.shape)

    def _product(self, grid: Grid, matrix: np.ndarray, scale: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        floats = float8 if self.weight.dtype in FLOAT8 else lambda part: float4(part.view(np.uint8))
        return grid.product(lambda part: floats(matrix[part]), scale, None, dtype)


@dataclass(frozen=True)
class BlockFp8(Scheme):
    """`quant_method` "fp8"."""

    block: tuple[int, int] | None  # None: one scale for all of a tensor

    companions: ClassVar[Mapping[str, tuple[str, str]]] = {
        "_scale_inv": ("scale", ""),
        ".weight_scale": ("scale", ".weight"),
        ".scale": ("scale", ".weight"),
    }

    def layout(self, name: str, parts: Parts) -> Layout:
        """Blocks of the config, or of four-bit floats."""
        weight = part_of(parts, "weight", "scale", (*FLOAT8, *FLOAT4))
        if len(weight.shape) < 2:
            raise Misfit(f"expected {weight.name} of two dimensions or more, got shape {weight.shape}")
        *outer, rows, columns = weight.shape
        if weight.dtype in FLOAT4:
            columns *= 2
        shape = (*outer, rows, columns)
        scale = part_of(parts, "scale", "weight", SCALES)
        if int(np.prod(scale.shape)) == 1 and self.block is None:
            return ScaledFloats(weight, scale, (rows, columns), shape)
        block = FLOAT4_BLOCK if weight.dtype in FLOAT4 else self.block or (rows, columns)
        expected = (*outer, -(-rows // block[0]), -(-columns // block[1]))
        part_of(parts, "scale", "weight", SCALES, expected)
        return ScaledFloats(weight, scale, block, shape)


def block_fp8(config: Mapping[str, Any], where: str) -> BlockFp8:
    """The scheme of a `quantization_config`.

    Raises:
        ConfigError: blocks are no two positive integers.
    """
    block = config.get("weight_block_size", DEFAULT_BLOCK)
    if block is None:
        return BlockFp8(None)
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(one) is not int or one < 1 for one in block):
        raise ConfigError(f"{where}: expected 'weight_block_size' as two positive integers or null, got {block!r}")
    return BlockFp8((block[0], block[1]))
