"""Reads the keys of a Hugging Face config.json; every key is either used, known to be informational, or an error.

Flow:    dict -> [parse_config] -> ModelConfig
Source:  the configuration_*.py of transformers: `rope_theta`, `rope_scaling`, `torch_dtype` before version 5,
         `rope_parameters`, `dtype` since
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING, ModelConfig, RopeConfig
from kvjax.models.hf_architectures import (
    ARCHITECTURES,
    INFORMATIONAL_KEYS,
    INFORMATIONAL_OUTER_KEYS,
    INHERITED_KEYS,
    MOE_ARCHITECTURES,
    Architecture,
)

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_REQUIRED = object()


class _Keys:
    """A config's keys, each to be taken once; what is left over at the end is unknown."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._data = data
        self._defaults = defaults
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value; a missing or null one is the architecture's default, else `default`."""
        self._taken.add(key)
        value = self._data.get(key)
        if value is None:
            value = self._defaults.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.where}: expected the key {key!r}, got none")
        return value

    def take_nullable(self, key: str) -> Any:
        """The value, where an explicit null means none and only a missing key means the architecture's default."""
        self._taken.add(key)
        return self._data[key] if key in self._data else self._defaults.get(key)

    def take_int(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.where}: expected {key!r} to be a positive integer, got {value!r}")
        return value

    def take_float(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{self.where}: expected {key!r} to be a positive number, got {value!r}")
        return float(value)

    def take_flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: expected {key!r} to be true or false, got {value!r}")
        return value

    def take_object(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None."""
        value = self.take(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: expected {key!r} to be an object, got {value!r}")
        return value

    def finish(self, informational: frozenset[str]) -> None:
        """Raises ConfigError where keys are left."""
        unknown = sorted(set(self._data) - self._taken - informational)
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown keys {', '.join(unknown)}; expected none beyond those this version reads: "
                f"remove them only if they do not change what the model computes"
            )


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """As `ModelConfig.from_dict`."""
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"{where}: expected one of the architectures {', '.join(ARCHITECTURES)}, got {names!r}")
    architecture = ARCHITECTURES[names[0]]
    if not architecture.has_text_config:
        keys = _Keys(data, architecture.defaults, where)
        keys.take("architectures")
        return _parse_text(names[0], architecture, keys)
    outer = _Keys(data, {}, where)
    outer.take("architectures")
    text = outer.take_object("text_config")
    if text is None:
        raise ConfigError(f"{where}: expected the key 'text_config', got none")
    inherited = {key: outer.take_nullable(key) for key in INHERITED_KEYS if key in data and key not in text}
    outer.finish(INFORMATIONAL_OUTER_KEYS)
    keys = _Keys({**text, **inherited}, architecture.defaults, f"{where}: text_config")
    return _parse_text(names[0], architecture, keys)


def _parse_text(name: str, architecture: Architecture, keys: _Keys) -> ModelConfig:
    """The language model's part."""
    keys.take("architectures", None)
    sizes = {
        "num_layers": keys.take_int("num_hidden_layers"),
        "hidden_size": keys.take_int("hidden_size"),
        "intermediate_size": keys.take_int("intermediate_size"),
        "num_q_heads": keys.take_int("num_attention_heads"),
        "vocab_size": keys.take_int("vocab_size"),
        "max_model_len": keys.take_int("max_position_embeddings"),
    }
    head_dim = keys.take_int("head_dim", max(sizes["hidden_size"] // sizes["num_q_heads"], 1))
    values: dict[str, Any] = {
        "architecture": name,
        "family": architecture.family,
        **sizes,
        "num_kv_heads": keys.take_int("num_key_value_heads", sizes["num_q_heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": keys.take_float("rms_norm_eps"),
        "sm_scale": head_dim**-0.5,
        "tie_word_embeddings": keys.take_flag("tie_word_embeddings", False),
        "attention_bias": keys.take_flag("attention_bias", False),
        "dtype": _parse_dtype(keys),
        "bos_token_id": keys.take_nullable("bos_token_id"),
        "eos_token_ids": _parse_eos(keys),
    }
    family = {"llama": _llama_values, "qwen3": _qwen3_values, "gemma3": _gemma3_values}[architecture.family]
    values |= family(keys, sizes["num_layers"])
    if name in MOE_ARCHITECTURES:
        values |= _moe_values(keys)
    values |= _parse_rope(keys, values["max_model_len"], architecture)
    keys.finish(INFORMATIONAL_KEYS)
    return ModelConfig(**values)


def _llama_values(keys: _Keys, num_layers: int) -> dict[str, Any]:
    return {
        "hidden_act": _parse_activation(keys, "hidden_act"),
        "mlp_bias": keys.take_flag("mlp_bias", False),
        "layer_types": (FULL,) * num_layers,
    }


def _qwen3_values(keys: _Keys, num_layers: int) -> dict[str, Any]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window` says so at all."""
    slides = keys.take_flag("use_sliding_window", False)
    keys.take("sliding_window", None)
    first = keys.take("max_window_layers", num_layers)
    default = tuple(SLIDING if slides and i >= first else FULL for i in range(num_layers))
    return {
        "hidden_act": _parse_activation(keys, "hidden_act"),
        "layer_types": tuple(keys.take("layer_types", default)),
        "sliding_window": keys.take_int("sliding_window") if slides else None,
    }


def _gemma3_values(keys: _Keys, num_layers: int) -> dict[str, Any]:
    """Every `sliding_window_pattern`-th layer is full unless `layer_types` says otherwise."""
    if keys.take_flag("use_bidirectional_attention", False):
        raise ConfigError(f"{keys.where}: expected 'use_bidirectional_attention' to be false, got true")
    pattern = keys.take_int("sliding_window_pattern")
    default = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    return {
        "hidden_act": _parse_activation(keys, "hidden_activation"),
        "layer_types": tuple(keys.take("layer_types", default)),
        "sliding_window": keys.take_int("sliding_window"),
        "sm_scale": keys.take_float("query_pre_attn_scalar") ** -0.5,
        "attn_logit_soft_cap": _parse_soft_cap(keys, "attn_logit_softcapping"),
        "final_logit_soft_cap": _parse_soft_cap(keys, "final_logit_softcapping"),
    }


def _moe_values(keys: _Keys) -> dict[str, Any]:
    """Experts do not change the cache; their keys are read so that only unknown ones are errors."""
    for key in ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"):
        keys.take(key, None)
    keys.take("num_experts_per_tok", None)
    local = keys.take("num_local_experts", None)
    return {"num_experts": keys.take_int("num_experts") if local is None else keys.take_int("num_local_experts")}


def _parse_dtype(keys: _Keys) -> str:
    """`dtype`, or `torch_dtype` of older files; float32 where neither is."""
    old = keys.take("torch_dtype", "float32")
    name = keys.take("dtype", old)
    if name not in _DTYPES:
        raise ConfigError(f"{keys.where}: expected 'dtype' among {', '.join(_DTYPES)}, got {name!r}")
    return name


def _parse_eos(keys: _Keys) -> tuple[int, ...]:
    eos = keys.take_nullable("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _parse_activation(keys: _Keys, key: str) -> str:
    name = keys.take(key)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{keys.where}: expected {key!r} among {', '.join(_ACTIVATIONS)}, got {name!r}")
    return name


def _parse_soft_cap(keys: _Keys, key: str) -> float | None:
    return keys.take_float(key) if keys.take(key, None) is not None else None


def _parse_rope(keys: _Keys, max_len: int, architecture: Architecture) -> dict[str, RopeConfig]:
    """Rotary parameters: one object, one per layer type, or the older separate keys."""
    theta = keys.take_float("rope_theta")
    scaling = keys.take_object("rope_scaling") or {}
    parameters = keys.take_object("rope_parameters")
    has_local = architecture.family == "gemma3"
    local_theta = keys.take_float("rope_local_base_freq") if has_local else theta
    if parameters is not None and (FULL in parameters or SLIDING in parameters):
        by_type = _Keys(parameters, {}, f"{keys.where}: rope_parameters")
        scaling = by_type.take_object(FULL) or {}
        local = by_type.take_object(SLIDING) or {}
        by_type.finish(frozenset())
    else:
        scaling = scaling if parameters is None else parameters
        local = {}
    where = f"{keys.where}: rope_parameters"
    values = {"rope": _rope_config(scaling, theta, max_len, architecture.has_mrope, where)}
    if has_local:
        values["rope_local"] = _rope_config(local, local_theta, max_len, False, where)
    return values


def _rope_config(data: Mapping[str, Any], theta: float, max_len: int, has_mrope: bool, where: str) -> RopeConfig:
    """One rotary embedding; `theta` is used where the object has none."""
    keys = _Keys(data, {}, where)
    old_type = keys.take("type", "default")
    rope_type = keys.take("rope_type", old_type)
    values: dict[str, Any] = {"theta": keys.take_float("rope_theta", theta), "rope_type": rope_type}
    if rope_type == "linear":
        values["factor"] = keys.take_float("factor")
    elif rope_type == "llama3":
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            values[key] = keys.take_float(key)
        values["original_max_len"] = keys.take_int("original_max_position_embeddings", max_len)
    elif rope_type != "default":
        raise ConfigError(f"{where}: expected 'rope_type' among default, linear, llama3, got {rope_type!r}")
    if has_mrope:
        keys.take("mrope_interleaved", None)
        values["mrope_section"] = tuple(keys.take("mrope_section"))
    keys.finish(frozenset())
    return RopeConfig(**values)
