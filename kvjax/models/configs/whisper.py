"""Whisper: an encoder over audio features, a decoder with cross attention to what it makes. No jax.

Flow:    config.json -> [WhisperConfig] -> decoders.whisper
Source:  transformers' configuration_whisper.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.models.configs.decoder import ACTIVATIONS
from kvjax.models.configs.keys import ConfigKeys


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(ModelConfig):
    """`num_layers` are the decoder's; each has full self-attention and cross attention, of as many heads."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 50_256,
        "d_model": 384,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "encoder_layers": 4,
        "eos_token_id": 50_256,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "activation_dropout",
            "apply_spec_augment",
            "classifier_proj_size",
            "decoder_layerdrop",
            "decoder_start_token_id",
            "dropout",
            "encoder_layerdrop",
            "forced_decoder_ids",
            "init_std",
            "mask_feature_length",
            "mask_feature_min_masks",
            "mask_feature_prob",
            "mask_time_length",
            "mask_time_min_masks",
            "mask_time_prob",
            "median_filter_width",
            "num_hidden_layers",
            "scale_embedding",  # transformers computes the factor and applies it nowhere
            "use_weighted_layer_sum",
        ]
    )

    hidden_size: int
    num_encoder_layers: int
    num_encoder_heads: int
    num_decoder_heads: int
    encoder_intermediate_size: int
    decoder_intermediate_size: int
    num_mel_bins: int
    max_num_encoder_tokens: int
    hidden_act: str
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        for name in ("num_encoder_heads", "num_decoder_heads"):
            if self.hidden_size % getattr(self, name):
                raise ConfigError(
                    f"expected d_model to be a multiple of {name}, got {self.hidden_size} and {getattr(self, name)}"
                )

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        architecture = keys.take("architectures")[0]
        return cls(
            architecture=architecture,
            num_layers=keys.take_int("decoder_layers"),
            vocab_size=keys.take_int("vocab_size"),
            max_model_len=keys.take_int("max_target_positions"),
            dtype=keys.take_dtype(),
            bos_token_id=keys.take_nullable("bos_token_id"),
            eos_token_ids=keys.take_eos(),
            hidden_size=keys.take_int("d_model"),
            num_encoder_layers=keys.take_int("encoder_layers"),
            num_encoder_heads=keys.take_int("encoder_attention_heads"),
            num_decoder_heads=keys.take_int("decoder_attention_heads"),
            encoder_intermediate_size=keys.take_int("encoder_ffn_dim"),
            decoder_intermediate_size=keys.take_int("decoder_ffn_dim"),
            num_mel_bins=keys.take_int("num_mel_bins", 80),
            max_num_encoder_tokens=keys.take_int("max_source_positions"),
            hidden_act=keys.take_choice("activation_function", ACTIVATIONS, "gelu"),
            tie_word_embeddings=keys.take_flag("tie_word_embeddings", True),
        )

    @property
    def head_dim(self) -> int:
        """The dimension of the decoder's heads."""
        return self.hidden_size // self.num_decoder_heads

    @property
    def cache_words(self) -> str:
        """Heads of a layer, and what the encoder makes."""
        return f"{self.num_decoder_heads} KV heads of {self.head_dim}, {self.max_num_encoder_tokens:,} encoder tokens"

    @property
    def encoder_shapes(self) -> Mapping[tuple[int, ...], int]:
        """Log-mel features of one length: the encoder's convolutions make a token of two frames."""
        return {(self.num_mel_bins, 2 * self.max_num_encoder_tokens): self.max_num_encoder_tokens}

    def for_length(self, max_model_len: int) -> WhisperConfig:
        """Itself: positions are rows of a table of the checkpoint."""
        del max_model_len
        return self

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Caches of the decoder layers, `layers.{i}.self` and `layers.{i}.cross`."""
        common: dict[str, Any] = {
            "block_size": block_size or self.default_block_size,
            "num_kv_heads": self.num_decoder_heads,
            "head_size": self.head_dim,
            "dtype": dtype or self.dtype,
        }
        cross = CrossAttentionSpec(**common, max_num_encoder_tokens=self.max_num_encoder_tokens)
        full = FullAttentionSpec(**common)
        specs: dict[str, KVCacheSpec] = {f"layers.{i}.self": full for i in range(self.num_layers)}
        return specs | {f"layers.{i}.cross": cross for i in range(self.num_layers)}

    @property
    def split_units(self) -> Mapping[str, int]:
        """Heads of the decoder."""
        return {"heads": self.num_decoder_heads}

    def splits_cache(self, num_shards: int) -> bool:
        """Whether every device can have whole heads."""
        return self.num_decoder_heads % num_shards == 0
