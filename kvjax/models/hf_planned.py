"""Reads config.json of models that can be planned but not run: only what their caches are made of.

Flow:    dict -> [parse_planned] -> PlannedModel
Source:  the configuration_*.py of transformers

Keys that do not change the cache are listed per architecture, so that unknown ones are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.informational import INFORMATIONAL_KEYS, INFORMATIONAL_OUTER_KEYS
from kvjax.models.configs.keys import ConfigKeys, text_keys
from kvjax.models.hf_planned_keys import (
    DECODER_KEYS,
    GEMMA3N_KEYS,
    GEMMA3N_OUTER_KEYS,
)
from kvjax.models.planned import (
    AttentionModel,
    PlannedModel,
)


@dataclass(frozen=True)
class _Planned:
    """How one entry of `architectures` is read."""

    parse: Callable[[ConfigKeys, dict[str, Any]], PlannedModel]
    ignored_keys: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_text_config: bool = False
    ignored_outer_keys: frozenset[str] = frozenset()


def parse_planned(data: Mapping[str, Any], name: str, where: str) -> PlannedModel:
    """The model of architecture `name`, one of `PLANNED_ARCHITECTURES`.

    Raises:
        ConfigError: an unknown or a missing key, or a value that cannot be; `where` and the key are in the message.
    """
    planned = PLANNED_ARCHITECTURES[name]
    if planned.has_text_config:
        outer_keys = INFORMATIONAL_OUTER_KEYS | planned.ignored_outer_keys | {"quantization_config"}
        keys = text_keys(data, planned.defaults, where, outer_keys)
    else:
        keys = ConfigKeys(data, planned.defaults, where)
    model = planned.parse(keys, {"architecture": name, "dtype": keys.take_dtype()})
    keys.finish(INFORMATIONAL_KEYS | planned.ignored_keys)
    return model


def _sizes(keys: ConfigKeys) -> dict[str, Any]:
    return {
        "num_layers": keys.take_int("num_hidden_layers"),
        "max_model_len": keys.take_int("max_position_embeddings"),
    }


def _heads(keys: ConfigKeys) -> dict[str, Any]:
    """KV heads and their dimension, by default those of the queries."""
    num_q_heads = keys.take_int("num_attention_heads")
    head_dim = max(keys.take_int("hidden_size", num_q_heads) // num_q_heads, 1)
    return {
        "num_kv_heads": keys.take_int("num_key_value_heads", num_q_heads),
        "head_dim": keys.take_int("head_dim", head_dim),
    }


def _parse_gemma3n(keys: ConfigKeys, common: dict[str, Any]) -> PlannedModel:
    """Every fifth layer is full; the last `num_kv_shared_layers` have no pages of their own."""
    sizes = _sizes(keys)
    default = tuple(SLIDING if (i + 1) % 5 else FULL for i in range(sizes["num_layers"]))
    num_shared = keys.take("num_kv_shared_layers")
    types = keys.take_layer_types(default, (FULL, SLIDING))
    if not isinstance(num_shared, int) or not set(types[len(types) - num_shared :]) <= set(types[:-num_shared]):
        raise ConfigError(
            f"{keys.where}: expected num_kv_shared_layers to leave a layer of each type with pages, got {num_shared!r}"
        )
    return AttentionModel(
        **common,
        **sizes,
        **_heads(keys),
        layer_types=types,
        sliding_window=keys.take_int("sliding_window"),
        num_shared_layers=num_shared,
    )


_GEMMA3N_DEFAULTS = {"num_kv_shared_layers": 15, "sliding_window": 512, "max_position_embeddings": 32_768}

PLANNED_ARCHITECTURES: dict[str, _Planned] = {
    "Gemma3nForConditionalGeneration": _Planned(
        _parse_gemma3n, DECODER_KEYS | GEMMA3N_KEYS, _GEMMA3N_DEFAULTS, True, GEMMA3N_OUTER_KEYS
    ),
}
