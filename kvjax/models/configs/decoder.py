"""What the frame of a decoder reads of any family: sizes, norms, embeddings, the output head. No jax.

Flow:    ConfigKeys -> [take_sizes] -> a family's [DecoderConfig] -> layers.decoder
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.configs.keys import ConfigKeys

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder-only model, whatever its layers are."""

    hidden_size: int
    intermediate_size: int  # of a feed-forward part without experts
    rms_norm_eps: float
    hidden_act: str  # one of ACTIVATIONS
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # norms multiply by their weight plus this
    centres_norms: bool = False  # norms of hidden states take the mean away (LayerNorm without a bias)
    residual_scale: float = 1.0  # of what each part of a layer adds
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_soft_cap: float | None = None


def take_token_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields that every model has, `num_layers` apart: architecture, vocabulary, length, dtype, special tokens."""
    architecture = keys.take("architectures")
    return {
        "architecture": architecture[0],
        "vocab_size": keys.take_int("vocab_size"),
        "max_model_len": keys.take_int("max_position_embeddings"),
        "dtype": keys.take_dtype(),
        "bos_token_id": keys.take_nullable("bos_token_id"),
        "eos_token_ids": keys.take_eos(),
    }


def take_sizes(
    keys: ConfigKeys, *, activation_key: str = "hidden_act", num_layers: int | None = None
) -> dict[str, Any]:
    """The fields that every decoder has, but for `intermediate_size`; `num_layers` where other keys say it."""
    return {
        **take_token_fields(keys),
        "num_layers": keys.take_int("num_hidden_layers") if num_layers is None else num_layers,
        "hidden_size": keys.take_int("hidden_size"),
        "rms_norm_eps": keys.take_float("rms_norm_eps", 1e-6),
        "hidden_act": keys.take_choice(activation_key, ACTIVATIONS, "silu"),
        "tie_word_embeddings": keys.take_flag("tie_word_embeddings", False),
    }
