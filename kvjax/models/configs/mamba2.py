"""Mamba 2 alone: every layer has a state, none attends. No jax.

Flow:    config.json -> [Mamba2ModelConfig] -> decoders.mamba2
Source:  transformers' configuration_mamba2.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.configs.decoder import DecoderConfig, take_sizes
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.mamba import Mamba2Config, take_dt_limit


@dataclass(frozen=True, kw_only=True)
class Mamba2ModelConfig(DecoderConfig):
    """One Mamba layer after another. Files give no longest text, since states do not grow."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "max_position_embeddings": 1_048_576,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [  # transformers reads none of them, or for training alone
            "chunk_size",
            "intermediate_size",
            "norm_before_gate",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rms_norm",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        ]
    )

    mamba: Mamba2Config

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        sizes = take_sizes(keys)
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
        mamba = take_mamba2(keys, sizes["hidden_size"])
        eps = keys.take_float("layer_norm_epsilon", 1e-5)
        return cls(**sizes | {"rms_norm_eps": eps}, intermediate_size=mamba.inner_size, mamba=mamba)

    @property
    def cache_words(self) -> str:
        """How many layers have states."""
        return f"{self.num_layers} layers with states"

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """The state of every layer. Its block is worth its bytes in an attention layer of the model's width."""
        width = FullAttentionSpec(
            block_size=block_size or self.default_block_size,
            num_kv_heads=1,
            head_size=self.hidden_size,
            dtype=self.dtype if dtype is None else dtype,
        )
        spec = self.mamba.state.spec(width.block_size, width.page_size_bytes // width.block_size, self.dtype)
        return {f"layers.{i}": spec for i in range(self.num_layers)}

    @property
    def split_units(self) -> Mapping[str, int]:
        """Heads."""
        return {"Mamba heads": self.mamba.num_heads}

    def splits_cache(self, num_shards: int) -> bool:
        """Whether every device can have whole heads and channels of states."""
        return self.mamba.state.splits(num_shards)


def take_mamba2(keys: ConfigKeys, hidden_size: int) -> Mamba2Config:
    """Sizes of the layers."""
    inner = keys.take_int("expand", 2) * hidden_size
    num_heads, head_dim = keys.take_int("num_heads", 128), keys.take_int("head_dim", 64)
    if num_heads * head_dim != inner:
        raise ConfigError(
            f"{keys.where}: expected num_heads * head_dim to be {inner} (expand * hidden_size), "
            f"got {num_heads} * {head_dim}"
        )
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=keys.take_int("n_groups", 8),
        state_dim=keys.take_int("state_size", 128),
        num_taps=keys.take_int("conv_kernel", 4, most=MAX_TAPS),
        conv_bias=keys.take_flag("use_conv_bias", True),
        proj_bias=keys.take_flag("use_bias", False),
        dt_limit=take_dt_limit(keys),
    )
