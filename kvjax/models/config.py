"""What a decoder is: sizes, rotary embeddings, and which layers see how far. No jax.

Flow:    config.json of a Hugging Face folder -> (hf_config) -> [ModelConfig] -> Decoder, kv_cache_specs -> planner
Source:  the config classes of transformers: Llama, Qwen3, Qwen3-MoE, Qwen3-VL, Gemma 3
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
RECURRENT = "linear_attention"
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer; `rope_type` is "default", "linear" or "llama3"."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    mrope_section: tuple[int, ...] = ()  # frequencies for time, height and width; not empty: multimodal positions


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only language model. Hashable, so that it may be static in jitted functions."""

    architecture: str
    family: str  # "llama", "qwen3" or "gemma3"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    hidden_act: str  # "silu" or "gelu_pytorch_tanh"
    sm_scale: float
    layer_types: tuple[str, ...]  # per layer: "full_attention" or "sliding_attention"
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # sliding layers; None: as the others
    sliding_window: int | None = None  # tokens that a sliding layer sees, itself included
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_logit_soft_cap: float | None = None
    final_logit_soft_cap: float | None = None
    num_experts: int = 0
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected num_attention_heads to be a multiple of num_key_value_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(f"expected {self.num_layers} layer_types, got {len(self.layer_types)}")
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise ConfigError(f"expected layer_types among {FULL!r} and {SLIDING!r}, got {', '.join(unknown)}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ConfigError("expected a sliding_window, since layer_types has sliding layers; got none")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """The config that a parsed config.json describes; keys of older and newer transformers are both read.

        Raises:
            ConfigError: an unknown key or architecture, a missing key, or a value that cannot be; `where` and the
                key are in the message.
        """
        from kvjax.models.hf_config import parse_config

        return parse_config(data, where)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """The config of a Hugging Face folder; end tokens of a generation_config.json take precedence.

        Raises:
            ConfigError: no config.json, one that is not a JSON object, or as `from_dict`.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"expected a Hugging Face model folder with {path.name}, found no {path}")
        config = cls.from_dict(read_json_object(path), where=str(path))
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = read_json_object(generation).get("eos_token_id")
            if eos is not None:
                config = replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
        return config

    @property
    def cache_words(self) -> str:
        """What a token's cache is made of."""
        return f"{self.num_kv_heads} KV heads of {self.head_dim}"

    @property
    def shared_layers(self) -> dict[str, str]:
        """None: every layer has pages of its own."""
        return {}

    @property
    def is_planning_only(self) -> bool:
        """True if only memory can be planned for it: the decoders here have no experts and no image positions."""
        return self.num_experts > 0 or bool(self.rope.mrope_section)

    def rope_of(self, layer_type: str) -> RopeConfig:
        """Rotary embedding of the layers of one type."""
        return self.rope_local if layer_type == SLIDING and self.rope_local is not None else self.rope

    def window_of(self, layer: int) -> int | None:
        """Sliding window of decoder layer `layer`, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer by its name, `layers.{i}`, in layer order; `dtype` None: the model's own."""
        specs: dict[str, KVCacheSpec] = {}
        common: dict[str, Any] = {
            "block_size": block_size or DEFAULT_BLOCK_SIZE,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_dim,
            "dtype": self.dtype if dtype is None else dtype,
        }
        for layer in range(self.num_layers):
            window = self.window_of(layer)
            if window is None:
                specs[f"layers.{layer}"] = FullAttentionSpec(**common)
            else:
                specs[f"layers.{layer}"] = SlidingWindowSpec(**common, sliding_window=window)
        return specs


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: it holds no JSON, or other than an object.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data
