"""Which config class and which decoder an architecture of config.json has. A new family is an entry here.

Flow:    config.json -> [parse_config] -> ModelConfig -> [build_model] -> LanguageModel

Configs need no jax; a decoder's module is loaded when one is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.models.configs.informational import INFORMATIONAL_KEYS
from kvjax.models.configs.keys import ConfigKeys, text_keys

if TYPE_CHECKING:
    from flax import nnx

    from kvjax.models.layers.language_model import LanguageModel


@dataclass(frozen=True)
class Family:
    """Where the two classes of an architecture are."""

    module: str  # in `configs`, and in `decoders` unless the decoder names another one
    config: str
    decoder: str  # its class, or "module.class"
    has_text_config: bool = False  # the language model's keys stand in `text_config`


_FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": Family("parts.cohere", "Cohere2Config", "parts.CohereDecoder"),
    "CohereForCausalLM": Family("parts.cohere", "CohereConfig", "parts.CohereDecoder"),
    "DeepseekV2ForCausalLM": Family("deepseek", "DeepseekV2Config", "DeepseekDecoder"),
    "DeepseekV32ForCausalLM": Family("deepseek_v32", "DeepseekV32Config", "deepseek.DeepseekDecoder"),
    "DeepseekV3ForCausalLM": Family("deepseek", "DeepseekV3Config", "DeepseekDecoder"),
    "DeepseekV4ForCausalLM": Family("deepseek_v4", "DeepseekV4Config", "DeepseekV4Decoder"),
    "FalconH1ForCausalLM": Family("falcon_h1", "FalconH1Config", "FalconH1Decoder"),
    "Gemma2ForCausalLM": Family("gemma", "Gemma2Config", "GemmaDecoder"),
    "Gemma3ForCausalLM": Family("gemma", "Gemma3Config", "GemmaDecoder"),
    "Gemma3ForConditionalGeneration": Family("gemma", "Gemma3Config", "GemmaDecoder", has_text_config=True),
    "Gemma3nForCausalLM": Family("gemma3n", "Gemma3nConfig", "Gemma3nDecoder"),
    "Gemma3nForConditionalGeneration": Family("gemma3n", "Gemma3nConfig", "Gemma3nDecoder", has_text_config=True),
    "Gemma4ForCausalLM": Family("gemma4", "Gemma4Config", "Gemma4Decoder"),
    "Gemma4ForConditionalGeneration": Family("gemma4", "Gemma4Config", "Gemma4Decoder", has_text_config=True),
    "GemmaForCausalLM": Family("parts.llamas", "GemmaConfig", "llama.LlamaDecoder"),
    "Glm4ForCausalLM": Family("parts.glm", "Glm4Config", "parts.Glm4Decoder"),
    "Glm4MoeForCausalLM": Family("parts.glm", "Glm4MoeConfig", "parts.Glm4MoeDecoder"),
    "GlmMoeDsaForCausalLM": Family("deepseek_v32", "GlmMoeDsaConfig", "deepseek.DeepseekDecoder"),
    "GptOssForCausalLM": Family("gpt_oss", "GptOssConfig", "GptOssDecoder"),
    "GraniteForCausalLM": Family("parts.llamas", "GraniteConfig", "llama.LlamaDecoder"),
    "GraniteMoeHybridForCausalLM": Family("granite_moe_hybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridDecoder"),
    "JambaForCausalLM": Family("jamba", "JambaConfig", "JambaDecoder"),
    "KimiLinearForCausalLM": Family("kimi_linear", "KimiLinearConfig", "KimiLinearDecoder"),
    "Lfm2ForCausalLM": Family("lfm2", "Lfm2Config", "Lfm2Decoder"),
    "Lfm2MoeForCausalLM": Family("lfm2", "Lfm2MoeConfig", "Lfm2Decoder"),
    "Lfm3ForCausalLM": Family("lfm3", "Lfm3Config", "Lfm3Decoder"),
    "Llama4ForCausalLM": Family("llama4", "Llama4Config", "Llama4Decoder"),
    "Llama4ForConditionalGeneration": Family("llama4", "Llama4Config", "Llama4Decoder", has_text_config=True),
    "LlamaForCausalLM": Family("llama", "LlamaConfig", "LlamaDecoder"),
    "Mamba2ForCausalLM": Family("mamba2", "Mamba2ModelConfig", "Mamba2Decoder"),
    "MiniMaxM2ForCausalLM": Family("parts.minimax_m2", "MiniMaxM2Config", "parts.MiniMaxM2Decoder"),
    "Ministral3ForCausalLM": Family("parts.mistral3", "Ministral3Config", "llama.LlamaDecoder"),
    "Mistral3ForConditionalGeneration": Family(
        "parts.mistral3", "Mistral3Config", "llama.LlamaDecoder", has_text_config=True
    ),
    "MistralLarge4ForConditionalGeneration": Family(
        "mistral_large4", "MistralLarge4Config", "MistralLarge4Decoder", has_text_config=True
    ),
    "MistralForCausalLM": Family("llama", "MistralConfig", "LlamaDecoder"),
    "MixtralForCausalLM": Family("mixtral", "MixtralConfig", "MixtralDecoder"),
    "NemotronHForCausalLM": Family("nemotron_h", "NemotronHConfig", "NemotronHDecoder"),
    "Olmo2ForCausalLM": Family("parts.olmo", "Olmo2Config", "parts.OlmoDecoder"),
    "Olmo3ForCausalLM": Family("parts.olmo", "Olmo3Config", "parts.OlmoDecoder"),
    "OlmoHybridForCausalLM": Family("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridDecoder"),
    "Phi3ForCausalLM": Family("llama", "Phi3Config", "Phi3Decoder"),
    "Qwen2ForCausalLM": Family("llama", "Qwen2Config", "LlamaDecoder"),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "parts.qwen2_5_vl", "Qwen2_5VLConfig", "qwen3_vl.Qwen2_5VLDecoder", has_text_config=True
    ),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3Config", "Qwen3Decoder"),
    "Qwen3MoeForCausalLM": Family("qwen3", "Qwen3MoeConfig", "Qwen3MoeDecoder"),
    "Qwen3NextForCausalLM": Family("qwen3_next", "Qwen3NextConfig", "Qwen3NextDecoder"),
    "Qwen3VLForConditionalGeneration": Family("qwen3_vl", "Qwen3VLConfig", "Qwen3VLDecoder", has_text_config=True),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "qwen3_vl", "Qwen3VLMoeConfig", "Qwen3VLMoeDecoder", has_text_config=True
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_next", "Qwen3_5Config", "Qwen3_5Decoder"),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_next", "Qwen3_5Config", "Qwen3_5Decoder", has_text_config=True),
    "Qwen3_5MoeForCausalLM": Family("qwen3_next", "Qwen3_5MoeConfig", "Qwen3_5Decoder"),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "qwen3_next", "Qwen3_5MoeConfig", "Qwen3_5Decoder", has_text_config=True
    ),
    "SmolLM3ForCausalLM": Family("parts.llamas", "SmolLM3Config", "llama.LlamaDecoder"),
    "WhisperForConditionalGeneration": Family("whisper", "WhisperConfig", "WhisperDecoder"),
}
ARCHITECTURES = tuple(_FAMILIES)


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """As `ModelConfig.from_dict`."""
    names = data.get("architectures") or _architectures_of(data)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in _FAMILIES:
        raise ConfigError(f"{where}: expected one of the architectures {', '.join(_FAMILIES)}, got {names!r:.200}")
    data = {**data, "architectures": names}
    family = _FAMILIES[names[0]]
    config_class = getattr(importlib.import_module(f"kvjax.models.configs.{family.module}"), family.config)
    try:
        return _parsed(data, family, config_class, where)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{where}: expected values of the types that {names[0]} has, got others: {error}") from error


def _parsed(data: Mapping[str, Any], family: Family, config_class: Any, where: str) -> ModelConfig:
    config_class, data = config_class.of_file(data)
    if family.has_text_config:
        keys = text_keys(data, config_class, where)
    else:
        keys = ConfigKeys(_renamed(data, config_class.key_aliases, where), config_class.defaults, where)
    config: ModelConfig = config_class.parse(keys)
    quantization = keys.take_object("quantization_config")
    if quantization:
        config = replace(config, quant_method=str(quantization.get("quant_method", "an unnamed method")))
    keys.finish(INFORMATIONAL_KEYS | config_class.ignored_keys)
    return config.for_length(config.longest_len)


def _architectures_of(data: Mapping[str, Any]) -> list[str]:
    """What `model_type` says, as transformers' AutoModel reads it, where a file names no architecture."""
    model_type = str(data.get("model_type")).removesuffix("_text").replace("_", "")
    return [
        name
        for name, family in _FAMILIES.items()
        if name.replace("_", "").partition("For")[0].lower() == model_type
        and family.has_text_config == ("text_config" in data)
    ]


def _renamed(data: Mapping[str, Any], aliases: Mapping[str, str], where: str) -> dict[str, Any]:
    """`data` with the names of keys that are read.

    Raises:
        ConfigError: one key has two values under its names.
    """
    renamed: dict[str, Any] = {}
    for key, value in data.items():
        if renamed.setdefault(aliases.get(key, key), value) != value:
            raise ConfigError(f"{where}: expected one value of {aliases.get(key, key)!r} and its other names, got two")
    return renamed


def build_model(config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs) -> LanguageModel:
    """A model of random weights.

    Raises:
        NotImplementedError: nothing here runs the architecture.
    """
    family = _FAMILIES.get(config.architecture)
    if family is None:
        raise NotImplementedError(
            f"expected one of the architectures {', '.join(_FAMILIES)}, got {config.architecture}"
        )
    module, _, name = family.decoder.rpartition(".")
    decoder_class = getattr(importlib.import_module(f"kvjax.models.decoders.{module or family.module}"), name)
    decoder: LanguageModel = decoder_class(config, dtype=dtype, rngs=rngs)
    return decoder
