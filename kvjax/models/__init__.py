"""Flax NNX decoders that load Hugging Face folders; ARCHITECTURE.md, "Models", lists the families.

`kvjax.models.config` and `configs` need no jax (planning uses them); the other names below are loaded when first asked
for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.models.config import ModelConfig, StreamingWindow
from kvjax.models.configs.rope import RopeConfig

if TYPE_CHECKING:
    from kvjax.models.chat import ChatPrompt, ChatTemplate, chat_prompt
    from kvjax.models.dense_attention import DenseAttention
    from kvjax.models.layers.decoder import Decoder
    from kvjax.models.load import LoadedModel, load_model
    from kvjax.models.registry import build_model
    from kvjax.models.tokenizer import Tokenizer

_HOME_OF = {
    "ChatPrompt": "chat",
    "ChatTemplate": "chat",
    "Decoder": "layers.decoder",
    "DenseAttention": "dense_attention",
    "LoadedModel": "load",
    "Tokenizer": "tokenizer",
    "build_model": "registry",
    "chat_prompt": "chat",
    "load_model": "load",
}

__all__ = [
    "ChatPrompt",
    "ChatTemplate",
    "Decoder",
    "DenseAttention",
    "LoadedModel",
    "ModelConfig",
    "RopeConfig",
    "StreamingWindow",
    "Tokenizer",
    "build_model",
    "chat_prompt",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
