"""Gemma 2 and Gemma 3 text.

Flow:    Gemma2Config, Gemma3Config -> [GemmaDecoder]
Source:  transformers' modeling_{gemma2,gemma3}.py, with whose outputs it agrees
"""

from __future__ import annotations

from typing import ClassVar

from kvjax.models.decoders.llama import LlamaDecoder
from kvjax.models.layers.blocks import Block, SandwichNormBlock


class GemmaDecoder(LlamaDecoder):
    """Norms before and after each part; what else differs, the config says."""

    block: ClassVar[type[Block]] = SandwichNormBlock
