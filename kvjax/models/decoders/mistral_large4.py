"""Mistral Large 4's language model.

Flow:    MistralLarge4Config -> [MistralLarge4Decoder]
Source:  transformers' modeling_mistral_large4.py, with whose outputs it agrees; tensors are named as Mistral's files
         have them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.mistral_large4 import MistralLarge4Config
from kvjax.models.decoders.deepseek import feed_forward_part, indexer_part
from kvjax.models.layers.attention.latent import LatentAttention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.layers.make import Make
from kvjax.models.layers.rotary import rope_tables


class LearnedRotation(nnx.Module):
    """Frequencies are multiplied by `exp(alpha)`."""

    def __init__(self, rope_dim: int, *, make: Make) -> None:
        self.alpha = make.float32_zeros(rope_dim // 2)


class MistralLarge4Decoder(Decoder):
    """Latent attention over the tokens that an indexer picks; experts but in the first layers."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *LanguageModel.ignored_tensors,
        *("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
        "mtp_dspark.",  # what predicts further tokens
    )
    tensor_renames: ClassVar[Mapping[str, str]] = {
        r"^tok_embeddings\.": "embed_tokens.",
        r"^output\.": "lm_head.",
        r"^lerope\.": "rotary_emb.",
        r"\.attention\.": ".self_attn.",
        r"\.wq\.": ".q_proj.",
        r"\.wkv_a_with_mqa\.": ".kv_a_proj_with_mqa.",
        r"\.wkv_b\.": ".kv_b_proj.",
        r"\.wo\.": ".o_proj.",
        r"\.kv_a_norm\.": ".kv_a_layernorm.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.ssmax_scaling\.s$": ".softmax_scaling.scale",
        r"\.ssmax_scaling\.b$": ".softmax_scaling.bias",
        r"\.feed_forward\.": ".mlp.",
        r"^(layers\.\d+)\.(gate|experts|shared_experts)\.": r"\1.mlp.\2.",
        r"\.(mlp|shared_experts)\.w1\.": r".\1.gate_proj.",
        r"\.(mlp|shared_experts)\.w2\.": r".\1.down_proj.",
        r"\.(mlp|shared_experts)\.w3\.": r".\1.up_proj.",
    }

    def __init__(self, config: MistralLarge4Config, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.rotary_emb = LearnedRotation(config.attention.rope_dim, make=Make(jnp.dtype(dtype), rngs))

    @staticmethod
    def make_layer(config: MistralLarge4Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        attention = LatentAttention(
            config.hidden_size,
            config.attention_of(layer),
            f"layers.{layer}",
            make,
            indexer=indexer_part(config, layer, make),
            shares=config.source_layers[layer] != layer,
        )
        mlp = feed_forward_part(config, layer, make, names=("w1", "w3", "w2"))
        return PreNormBlock(config, make, self_attn=attention, mlp=mlp)

    def forward_step(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> ForwardStep:
        """With tables of the learned frequencies."""
        step = super().forward_step(token_ids, positions, cache)
        attention, scales = self.config.attention, jnp.exp(self.rotary_emb.alpha[...])
        tables = rope_tables(attention.rope, positions, attention.rope_dim, step.max_model_len, scales=scales)
        step.take_rope_tables(attention.rope, attention.rope_dim, tables)
        return step
