"""What a released checkpoint's config.json says: every key that decides what is computed or has to be known.

Keys without a meaning for any reader (versions, dropout, spreads of first weights) are left out; test_config_forms.py
has them. Sources are where the values were read: a public repository that quotes the file, or configs/models here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Data = dict[str, Any]

AIC = "github.com/ai-dynamo/aiconfigurator, model_configs, 095f58a5"
MLC = "github.com/mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py, 79d603f0"
BRIDGE = "github.com/pufanyi/Megatron-Bridge, docs/models/llm/glm45.md; github.com/zyzshishui/slime, scripts/models"
QUOTED = "a public test that quotes the file of the Hub"
SHIPPED = "configs/models"
FP8: Data = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SIZE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Released:
    """One checkpoint; `refused` is part of why it is not read, None: it is."""

    name: str  # of the Hub
    source: str
    data: Data
    refused: str | None = None


def sized(common: Data, sizes: tuple[int, ...], **more: Any) -> Data:
    """`common` with the sizes of SIZE_KEYS and what else differs."""
    return common | dict(zip(SIZE_KEYS, sizes, strict=True)) | more
