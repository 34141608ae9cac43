"""Four-bit floats with a power of two for 32 of them: the experts of GPT-OSS.

Flow:    blocks uint8[E, out, G, 16], scales uint8[E, out, G] -> [Mxfp4] -> [E, 32 * G, out]
Source:  OCP Microscaling Formats (MX) 1.0; transformers' convert_moe_packed_tensors

Outputs are in the order of the plain weight (of `gate_up_proj` a gate and what it multiplies in turn), and only the
last two dimensions change places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvjax.models.quantised.bits import float4
from kvjax.models.quantised.grid import in_pieces, read_scale
from kvjax.models.quantised.scheme import Layout, Misfit, Parts, Scheme, Shape, part_of
from kvjax.models.tensor_files import StoredTensor

BLOCK_BYTES = 16  # two numbers each


@dataclass(frozen=True)
class Mxfp4Layout(Layout):
    """One projection of all experts."""

    blocks: StoredTensor
    scales: StoredTensor
    shape: Shape  # [E, in, out]

    def dequantise(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The numbers times their powers of two, which is exact in float32."""
        experts, inputs, outputs = self.shape
        blocks = self.blocks.read().reshape(experts * outputs, -1, BLOCK_BYTES)
        scales = read_scale(self.scales).reshape(experts * outputs, -1, 1)

        def piece(part: slice) -> np.ndarray:
            return (float4(blocks[part]) * scales[part]).reshape(-1, inputs)

        out = in_pieces((experts * outputs, inputs), dtype, piece)
        return out.reshape(experts, outputs, inputs).swapaxes(1, 2)


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """`quant_method` "mxfp4"."""

    companions: ClassVar[Mapping[str, tuple[str, str]]] = {"_blocks": ("blocks", ""), "_scales": ("scales", "")}
    carriers: ClassVar[frozenset[str]] = frozenset({"blocks", "scales"})

    def layout(self, name: str, parts: Parts) -> Layout:
        """That of all experts."""
        if "weight" in parts:
            raise Misfit(f"expected it plain or quantised, got both it and {next(iter(parts.values())).name}")
        blocks = part_of(parts, "blocks", "scales", ("U8",))
        if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK_BYTES:
            raise Misfit(f"expected {blocks.name} of four dimensions, the last {BLOCK_BYTES}, got shape {blocks.shape}")
        scales = part_of(parts, "scales", "blocks", ("U8",), blocks.shape[:-1])
        experts, outputs, groups, _ = blocks.shape
        return Mxfp4Layout(blocks, scales, (experts, groups * BLOCK_BYTES * 2, outputs))


def mxfp4(config: Mapping[str, Any], where: str) -> Mxfp4:
    """The scheme of a `quantization_config`, of which nothing else matters."""
    del config, where
    return Mxfp4()
