"""Mamba 2 alone.

Flow:    Mamba2ModelConfig -> [Mamba2Decoder]
Source:  transformers' modeling_mamba2.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.configs.mamba2 import Mamba2ModelConfig
from kvjax.models.layers.blocks import OnePartBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.mamba import Mamba2


class Mamba2Decoder(Decoder):
    """A Mamba layer behind a norm, again and again."""

    tensor_prefixes: ClassVar[tuple[str, ...]] = ("backbone.",)
    anchor: ClassVar[str] = "embeddings.weight"
    tensor_names: ClassVar[Mapping[str, str]] = {"embed_tokens": "embeddings", "norm": "norm_f"}
    tensor_renames: ClassVar[Mapping[str, str]] = {r"\bembedding\.": "embeddings."}  # of older checkpoints

    @staticmethod
    def make_layer(config: Mamba2ModelConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        name, eps = f"layers.{layer}", config.rms_norm_eps
        mixer = Mamba2(config.hidden_size, config.mamba, name, eps=eps, make=make)
        return OnePartBlock(config, make, mixer=mixer)
