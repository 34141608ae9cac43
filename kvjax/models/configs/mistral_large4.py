"""Mistral Large 4's language model: latents that layers share, an indexer, layers without rotation. No jax.

Flow:    config.json -> [MistralLarge4Config] -> decoders.mistral_large4
Source:  transformers' configuration_mistral_large4.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.configs.decoder import take_sizes
from kvjax.models.configs.deepseek import DeepseekConfig, take_expert_sizes, take_groups, take_latent_attention
from kvjax.models.configs.deepseek_v32 import take_first_expert_layer, take_indexer, take_indexer_types
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.mistral3 import Mistral3Config
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class MistralLarge4Config(DeepseekConfig):
    """Queries of full rank whose scores grow with their position, by numbers that each head has learned."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "final_logit_softcapping": 30.0,
        "first_k_dense_replace": 1,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "kv_lora_rank": 512,
        "max_position_embeddings": 1_048_576,
        "moe_intermediate_size": 6144,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
        "v_head_dim": 128,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    outer_ignored_keys: ClassVar[frozenset[str]] = Mistral3Config.outer_ignored_keys
    tied_by: ClassVar[str] = "outer"
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        sizes = take_sizes(keys)
        num_layers = sizes["num_layers"]
        for key in ("q_lora_rank", "mlp_bias"):
            keys.refuse(key, "Mistral Large 4 has none in transformers")
        for key in ("rope_interleave", "indexer_rope_interleave", "norm_topk_prob"):
            keys.require(key, True)
        keys.require("num_key_value_heads", keys.take_int("num_attention_heads"))  # all are made of one latent
        rope = take_rope(keys, sizes["max_model_len"], default=cls.default_rope)
        indexer = replace(take_indexer(keys, num_layers, rope_interleaved=True), has_own_queries=True)
        attention = replace(
            take_latent_attention(keys, rope),
            norm_eps=sizes["rms_norm_eps"],
            scales_queries=True,
            indexer=indexer,
        )
        unrotated = _take_unrotated(keys, num_layers)
        types = take_indexer_types(keys, num_layers)
        return cls(
            **sizes,
            intermediate_size=keys.take_int("intermediate_size"),
            final_logit_soft_cap=keys.take_float("final_logit_softcapping"),
            attention=attention,
            experts=ExpertsConfig(
                **take_expert_sizes(keys),
                **take_groups(keys),
                norm_topk=True,
                scale=keys.take_float("routed_scaling_factor", 1.0),
            ),
            router_bias=False,
            shared_intermediate_size=keys.take_int("n_shared_experts") * keys.take_int("moe_intermediate_size"),
            first_expert_layer=take_first_expert_layer(keys, num_layers, keys.take_index("first_k_dense_replace")),
            indexed_layers=tuple(i for i, kind in enumerate(types) if kind == "full"),
            unrotated_layers=unrotated,
            source_layers=_take_sources(keys, num_layers, unrotated),
        )


def _take_unrotated(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Layers without rotation: by `no_rope_layers`, whose 0 says so, else every `no_rope_layer_interval`-th."""
    interval = keys.take_int("no_rope_layer_interval", 4)
    given = keys.take("no_rope_layers", None)
    rotated = [(i + 1) % interval != 0 for i in range(num_layers)] if given is None else list(given)
    if len(rotated) < num_layers or any(flag not in (0, 1) for flag in rotated):
        raise ConfigError(f"{keys.where}: expected no_rope_layers of 0 and 1 for {num_layers} layers, got {given}")
    return tuple(i for i in range(num_layers) if not rotated[i])


def _take_sources(keys: ConfigKeys, num_layers: int, unrotated: Sequence[int]) -> tuple[int, ...]:
    """The layer whose latents each layer reads, itself or one before it.

    transformers reads those of the last layer of the same rotation that others read; a file that says so is taken.
    """
    sources = list(keys.take("kv_source_layers", range(num_layers)))
    if len(sources) != num_layers or any(type(source) is not int for source in sources):
        raise ConfigError(f"{keys.where}: expected kv_source_layers of {num_layers} layers, got {sources}")
    last: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        kind = layer in unrotated
        if source != layer and last.get(kind) != source:
            others = f" or {last[kind]}, the last layer of its rotation that others read" if kind in last else ""
            raise ConfigError(f"{keys.where}: expected kv_source_layers[{layer}] to be {layer}{others}, got {source}")
        if source == layer and layer in sources[layer + 1 :]:
            last[kind] = layer
    return tuple(sources)
