"""Reads the keys of a Hugging Face config.json; every key is either used, known to be informational, or an error.

Flow:    dict -> [parse_config] -> ModelConfig
Source:  the configuration_*.py of transformers: their defaults, which files on the Hub leave out;
         `rope_theta`, `rope_scaling`, `torch_dtype` before version 5, `rope_parameters`, `dtype` since
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING, ModelConfig, RopeConfig

# Keys that change nothing a decoder or a planner computes at inference.
INFORMATIONAL_KEYS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "attention_dropout",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    ]
)
# Of a multimodal model's outer config, beside `text_config`.
INFORMATIONAL_OUTER_KEYS = INFORMATIONAL_KEYS | frozenset(
    [
        "boi_token_id",
        "boi_token_index",
        "dtype",
        "eoi_token_id",
        "eoi_token_index",
        "eos_token_id",
        "bos_token_id",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "torch_dtype",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    ]
)


@dataclass(frozen=True)
class _Architecture:
    """How one entry of `architectures` is read: its family, the defaults of its keys, and where its text part is."""

    family: str
    defaults: Mapping[str, Any]
    has_text_config: bool = False
    has_mrope: bool = False


_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN3: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_DENSE = {**_QWEN3, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

ARCHITECTURES: dict[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("llama", _LLAMA),
    "Qwen3ForCausalLM": _Architecture("qwen3", _QWEN3_DENSE),
    "Qwen3MoeForCausalLM": _Architecture("qwen3", _QWEN3_MOE),
    "Qwen3VLForConditionalGeneration": _Architecture("qwen3", _QWEN3_DENSE, has_text_config=True, has_mrope=True),
    "Qwen3VLMoeForConditionalGeneration": _Architecture("qwen3", _QWEN3_MOE, has_text_config=True, has_mrope=True),
    "Gemma3ForCausalLM": _Architecture("gemma3", _GEMMA3),
    "Gemma3ForConditionalGeneration": _Architecture("gemma3", _GEMMA3, has_text_config=True),
}
_MOE_ARCHITECTURES = frozenset({"Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"})
# What a text config has from its outer config where it does not say it itself.
_INHERITED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
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
    inherited = {key: outer.take_nullable(key) for key in _INHERITED_KEYS if key in data and key not in text}
    outer.finish(INFORMATIONAL_OUTER_KEYS)
    keys = _Keys({**text, **inherited}, architecture.defaults, f"{where}: text_config")
    return _parse_text(names[0], architecture, keys)


def _parse_text(name: str, architecture: _Architecture, keys: _Keys) -> ModelConfig:
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
    if name in _MOE_ARCHITECTURES:
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
    return _ACTIVATIONS[name]


def _parse_soft_cap(keys: _Keys, key: str) -> float | None:
    return keys.take_float(key) if keys.take(key, None) is not None else None


def _parse_rope(keys: _Keys, max_len: int, architecture: _Architecture) -> dict[str, RopeConfig]:
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
