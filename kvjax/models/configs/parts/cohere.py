"""Command R: both parts of a layer have one input; in those with windows sliding layers alone are rotated. No jax.

Flow:    config.json -> [CohereConfig, Cohere2Config] -> decoders.parts
Source:  transformers' configuration_{cohere,cohere2}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig, take_biases, take_windows


@dataclass(frozen=True, kw_only=True)
class CohereConfig(PartsConfig):
    """Command R: full attention."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 5,
        "eos_token_id": 255_001,
        "intermediate_size": 22_528,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    parts: ClassVar[Mapping[str, Any]] = {"centres_norms": True, "rope_interleaved": True}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, norms of heads, and the numbers that other families name otherwise."""
        return take_biases(keys) | {
            "norms_each_head": keys.take_flag("use_qk_norm", False),
            "rms_norm_eps": keys.take_float("layer_norm_eps"),
            "logit_scale": keys.take_float("logit_scale"),
        }


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(CohereConfig):
    """Command R7B and A: three layers in four slide, the others see all and rotate nothing."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **CohereConfig.defaults,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    said_anyway: ClassVar[Mapping[str, Any]] = {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
    }

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Command R, with windows."""
        keys.refuse("use_qk_norm", "transformers' Cohere2Attention has no norms of queries and keys")
        pattern = keys.take_int("sliding_window_pattern")
        default = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(fields["num_layers"]))
        windows = take_windows(keys, default)
        rotated = tuple(kind == SLIDING for kind in windows["layer_types"])
        return {**super().take_own(keys, fields), **windows, "rotated_layers": rotated}
