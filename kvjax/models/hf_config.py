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
    MOE_ARCHITECTURES,
    Architecture,
)
from kvjax.models.hf_keys import ConfigKeys, text_keys

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """As `ModelConfig.from_dict`."""
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"{where}: expected one of the architectures {', '.join(ARCHITECTURES)}, got {names!r}")
    architecture = ARCHITECTURES[names[0]]
    if not architecture.has_text_config:
        return _parse_text(names[0], architecture, ConfigKeys(data, architecture.defaults, where))
    keys = text_keys(data, architecture.defaults, where, INFORMATIONAL_OUTER_KEYS)
    return _parse_text(names[0], architecture, keys)


def _parse_text(name: str, architecture: Architecture, keys: ConfigKeys) -> ModelConfig:
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
        "dtype": keys.take_dtype(),
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


def _llama_values(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    return {
        "hidden_act": _parse_activation(keys, "hidden_act"),
        "mlp_bias": keys.take_flag("mlp_bias", False),
        "layer_types": (FULL,) * num_layers,
    }


def _qwen3_values(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
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


def _gemma3_values(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
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


def _moe_values(keys: ConfigKeys) -> dict[str, Any]:
    """Experts do not change the cache; their keys are read so that only unknown ones are errors."""
    for key in ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"):
        keys.take(key, None)
    keys.take("num_experts_per_tok", None)
    local = keys.take("num_local_experts", None)
    return {"num_experts": keys.take_int("num_experts") if local is None else keys.take_int("num_local_experts")}


def _parse_eos(keys: ConfigKeys) -> tuple[int, ...]:
    eos = keys.take_nullable("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _parse_activation(keys: ConfigKeys, key: str) -> str:
    name = keys.take(key)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{keys.where}: expected {key!r} among {', '.join(_ACTIVATIONS)}, got {name!r}")
    return name


def _parse_soft_cap(keys: ConfigKeys, key: str) -> float | None:
    return keys.take_float(key) if keys.take(key, None) is not None else None


def _parse_rope(keys: ConfigKeys, max_len: int, architecture: Architecture) -> dict[str, RopeConfig]:
    """Rotary parameters: one object, one per layer type, or the older separate keys."""
    theta = keys.take_float("rope_theta")
    scaling = keys.take_object("rope_scaling") or {}
    parameters = keys.take_object("rope_parameters")
    has_local = architecture.family == "gemma3"
    local_theta = keys.take_float("rope_local_base_freq") if has_local else theta
    if parameters is not None and (FULL in parameters or SLIDING in parameters):
        by_type = ConfigKeys(parameters, {}, f"{keys.where}: rope_parameters")
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
    keys = ConfigKeys(data, {}, where)
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
