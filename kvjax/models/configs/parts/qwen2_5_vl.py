"""The language model of Qwen2.5-VL: a Qwen2 of positions with three axes; vectors stand for image tokens. No jax.

Flow:    config.json -> [Qwen2_5VLConfig] -> decoders.qwen3_vl
Source:  transformers' configuration_qwen2_5_vl.py, whose defaults files on the Hub leave out; arXiv 2502.13923
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.models.configs.informational import INFORMATIONAL_OUTER_KEYS
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.llama import Qwen2Config
from kvjax.models.configs.qwen3_vl import TakesVectors, VisionInputs, take_placeholders
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLConfig(TakesVectors, Qwen2Config):
    """Time, height and width turn frequencies one after the other."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "intermediate_size": 29_568,
        "max_position_embeddings": 32_768,
        "max_window_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
    }
    outer_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        ["vision_end_token_id", "vision_start_token_id", "vision_token_id"]  # of the vision model, in text as well
    )
    outer_ignored_keys: ClassVar[frozenset[str]] = ignored_keys | {"sliding_window"}  # of files with both forms
    tied_by: ClassVar[str] = "either"

    inputs: VisionInputs

    @classmethod
    def of_file(cls, data: Mapping[str, Any]) -> tuple[type[ModelConfig], Mapping[str, Any]]:
        """Files on the Hub have the language model's keys beside `vision_config`."""
        if "text_config" in data:
            return cls, data
        outer = INFORMATIONAL_OUTER_KEYS | {*cls.outer_keys, "architectures", "tie_word_embeddings"}
        return cls, {**data, "text_config": {key: value for key, value in data.items() if key not in outer}}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Qwen2, with its rotation and what stands for tokens."""
        rope = take_rope(keys, fields["max_model_len"], mrope_section=(16, 24, 24), mrope_interleaved=False)
        if sum(rope.mrope_section) != fields["head_dim"] // 2:
            raise ConfigError(
                f"{keys.where}: expected 'mrope_section' to share {fields['head_dim'] // 2} frequencies, got "
                f"{list(rope.mrope_section)}"
            )
        inputs = VisionInputs(placeholder_token_ids=take_placeholders(keys), num_deepstack=0)
        return super().take_own(keys, fields) | {"rope": rope, "inputs": inputs}
