"""OLMo hybrid.

Flow:    OlmoHybridConfig -> [OlmoHybridDecoder]
Source:  transformers' modeling_olmo_hybrid.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.olmo_hybrid import OlmoHybridConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.decoders.qwen3_next import DeltaBlock
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PostNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.delta import GatedDeltaNet
from kvjax.models.tensor_sources import Either, Joined, TensorSource

_DELTA_EPS = 1e-5  # of the norm behind the rule, which no key says


class OlmoDeltaNet(GatedDeltaNet):
    """Queries, keys and values have a projection and a convolution each in checkpoints.

    transformers writes the convolutions as three equal parts of all channels.
    """

    tensor_names: ClassVar[Mapping[str, str]] = {
        "in_proj_z": "g_proj",
        "in_proj_b": "b_proj",
        "in_proj_a": "a_proj",
        "norm": "o_norm",
        "out_proj": "o_proj",
    }

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The sources of what is together here."""
        config, third = self.config, -(-self.config.num_channels // 3)
        sizes = (config.key_size, config.key_size, config.value_size)
        equal = (third, third, config.num_channels - 2 * third)
        projections, convolutions = (tuple(f"{name}_{part}.weight" for name in "qkv") for part in ("proj", "conv1d"))
        row = (1, config.num_taps)
        ways = (Joined(convolutions, each, transposed=False, row_shape=row) for each in (sizes, equal))
        return {
            **super().checkpoint_sources(),
            "in_proj_qkv.kernel": Joined(projections, sizes),
            "conv1d.weight": Either(tuple(ways)),
        }


class OlmoHybridDecoder(Decoder):
    """A gated delta net behind a norm or attention before one, then a dense part likewise."""

    tensor_renames: ClassVar[Mapping[str, str]] = {
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = ("mtp.",)

    @staticmethod
    def make_layer(config: OlmoHybridConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = dense_part(config, make)
        if config.layer_types[layer] == RECURRENT:
            net = OlmoDeltaNet(config.hidden_size, config.delta, layer, eps=_DELTA_EPS, make=make)
            return DeltaBlock(config, make, self_attn=net, mlp=mlp)
        return PostNormBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)
