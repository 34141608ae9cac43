"""The language model of Qwen3-VL: vectors stand for image tokens, positions have three axes. No jax.

Flow:    config.json -> [Qwen3VLConfig, Qwen3VLMoeConfig] -> decoders.qwen3_vl
Source:  transformers' configuration_{qwen3_vl,qwen3_vl_moe}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.configs.experts import COLUMNS, ROWS
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.llama import take_window
from kvjax.models.configs.qwen3 import Qwen3Config, Qwen3MoeConfig, take_expert_fields, take_qwen3_fields

_DEEPSTACK_LAYERS = (8, 16, 24)  # of the vision model, where a config does not say


@dataclass(frozen=True, kw_only=True)
class VisionInputs:
    """What stands for a token: its vector, then those that the first layers add to it (DeepStack)."""

    placeholder_token_ids: tuple[int, ...]
    num_deepstack: int


class TakesVectors:
    """What both models share: `inputs` says what stands for image and video tokens."""

    hidden_size: int
    inputs: VisionInputs

    @property
    def embedding_dim(self) -> int:
        """The vector of a token and those of the first layers, side by side."""
        return self.hidden_size * (1 + self.inputs.num_deepstack)

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Image and video tokens."""
        return self.inputs.placeholder_token_ids

    @property
    def has_mrope(self) -> bool:
        """Positions have a time, a height and a width."""
        return True


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(TakesVectors, Qwen3Config):
    """Dense."""

    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500_000.0}
    outer_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id", "vision_config")

    inputs: VisionInputs

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        return cls(**take_vision_fields(keys), inputs=take_vision_inputs(keys))


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(TakesVectors, Qwen3MoeConfig):
    """With experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500_000.0,
    }
    outer_keys: ClassVar[tuple[str, ...]] = Qwen3VLConfig.outer_keys
    expert_layouts: ClassVar[tuple[str, ...]] = (ROWS, COLUMNS)  # of transformers, of the Hub

    inputs: VisionInputs

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        keys.require("norm_topk_prob", True)
        return cls(**take_expert_fields(keys, take_vision_fields(keys)), inputs=take_vision_inputs(keys))


def take_vision_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of the layers, which all have full attention."""
    keys.require("use_sliding_window", False)
    for key in ("max_window_layers", "sliding_window"):
        keys.take(key, None)
    fields = take_qwen3_fields(keys, mrope_section=(24, 20, 20))
    return fields | take_window(keys, fields["num_layers"], slides=False)


def take_vision_inputs(keys: ConfigKeys) -> VisionInputs:
    """Placeholder tokens, and how many layers add vectors."""
    vision: Any = keys.take_object("vision_config") or {}
    deepstack = vision.get("deepstack_visual_indexes", _DEEPSTACK_LAYERS)
    return VisionInputs(placeholder_token_ids=take_placeholders(keys), num_deepstack=len(deepstack))


def take_placeholders(keys: ConfigKeys) -> tuple[int, int]:
    """Image and video tokens."""
    return keys.take("image_token_id", 151_655), keys.take("video_token_id", 151_656)
