"""Eight-bit floats with a scale for each block of a matrix, or one for all of it.

Flow:    weight float8[out, in], weight_scale_inv[out / rows, in / columns] -> [BlockFp8] -> weight * scale
Source:  DeepSeek V3's report (arXiv 2412.19437, section 3.3.2) and transformers' integrations/finegrained_fp8.py

Despite its name `weight_scale_inv` is multiplied by. The last block of a row or column may be cut off. DeepSeek V4 has
`scale` beside `weight`, and experts of two four-bit floats a byte whose blocks are 32 numbers of a row. Checkpoints of
AutoFP8 have one `weight_scale`. Scales are floats, or powers of two by their exponents (E8M0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.quantised.grid import check_blocks
from kvjax.models.quantised.scaled import FLOAT4, FLOAT8, ScaledFloats, floats_of
from kvjax.models.quantised.scheme import Layout, Parts, Scheme, part_of

SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
FLOAT4_BLOCK = (1, 32)
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class BlockFp8(Scheme):
    """`quant_method` "fp8"."""

    block: tuple[int, int] | None  # None: one scale for all of a tensor
    may_be_one: bool = (
        False  # a tensor may have one scale for all of it in spite of blocks, of which the config is silent
    )

    companions: ClassVar[Mapping[str, tuple[str, str]]] = {
        "_scale_inv": ("scale", ""),
        ".weight_scale": ("scale", ".weight"),
        ".scale": ("scale", ".weight"),
    }

    def layout(self, name: str, parts: Parts) -> Layout:
        """Blocks of the config, or of four-bit floats."""
        weight, shape = floats_of(parts, "weight", "scale", (*FLOAT8, *FLOAT4))
        scale = part_of(parts, "scale", "weight", SCALES)
        is_one = self.may_be_one and math.prod(scale.shape) == 1
        block = FLOAT4_BLOCK if weight.dtype in FLOAT4 else self.block
        if block is None or is_one:
            block = (shape[-2], shape[-1])
        check_blocks(scale, shape, block)
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
    return BlockFp8((block[0], block[1]), may_be_one="weight_block_size" not in config)


__all__ = ["BlockFp8", "block_fp8"]
