"""DeepSeek V3.2 and GLM 5: latent attention over the tokens that an indexer picks, experts as DeepSeek V3. No jax.

Flow:    config.json -> [DeepseekV32Config, GlmMoeDsaConfig] -> decoders.deepseek
Source:  transformers' configuration_{deepseek_v32,glm_moe_dsa}.py, whose defaults files on the Hub leave out; arXiv
         2512.02556, and 2603.12201 of layers that share what one picks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.configs.deepseek import DeepseekConfig, DeepseekV3Config, take_v3_fields
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.latent_attention import TokenIndexerConfig

INDEXED = "indexed_attention"
_OF_LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(DeepseekConfig):
    """An indexer in every layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **DeepseekV3Config.defaults,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "max_position_embeddings": 163_840,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    ignored_keys: ClassVar[frozenset[str]] = DeepseekConfig.ignored_keys | {"mlp_bias"}  # which no layer has

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_indexed_fields(keys, rope_interleaved=False)
        return cls(**fields, indexed_layers=tuple(range(fields["num_layers"])))


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekConfig):
    """An indexer in some layers; those behind one see what it picked."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **DeepseekV32Config.defaults,
        "index_n_heads": 32,
        "max_position_embeddings": 202_752,
        "n_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
        "v_head_dim": 256,
    }
    key_aliases: ClassVar[Mapping[str, str]] = DeepseekV32Config.key_aliases
    ignored_keys: ClassVar[frozenset[str]] = DeepseekV32Config.ignored_keys

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_indexed_fields(keys, rope_interleaved=True)
        types = take_indexer_types(keys, fields["num_layers"])
        return cls(**fields, indexed_layers=tuple(i for i, kind in enumerate(types) if kind == "full"))


def take_indexed_fields(keys: ConfigKeys, *, rope_interleaved: bool) -> dict[str, Any]:
    """The fields of DeepSeek V3, with an indexer whose rotation pairs neighbours where `rope_interleaved`."""
    keys.require("rope_interleave", True)
    keys.require("indexer_rope_interleave", rope_interleaved)
    fields = take_v3_fields(keys)
    if fields["attention"].query_rank is None:
        raise ConfigError(f"{keys.where}: expected a 'q_lora_rank', whose numbers the indexer projects, got null")
    num_layers = fields["num_layers"]
    indexer = take_indexer(keys, num_layers, rope_interleaved=rope_interleaved)
    return fields | {
        "attention": replace(fields["attention"], indexer=indexer),
        "first_expert_layer": take_first_expert_layer(keys, num_layers, fields["first_expert_layer"]),
    }


def take_indexer(keys: ConfigKeys, num_layers: int, *, rope_interleaved: bool) -> TokenIndexerConfig:
    """Sizes of the indexer that layers have."""
    keys.take_layer_types((INDEXED,) * num_layers, (INDEXED,))
    return TokenIndexerConfig(
        num_heads=keys.take_int("index_n_heads"),
        head_dim=keys.take_int("index_head_dim"),
        topk=keys.take_int("index_topk"),
        rope_interleaved=rope_interleaved,
    )


def take_first_expert_layer(keys: ConfigKeys, num_layers: int, default: int) -> int:
    """By `mlp_layer_types`, which goes before `first_k_dense_replace`."""
    types = keys.take("mlp_layer_types", None)
    if types is None:
        return default
    types = list(types)
    first = types.count("dense")
    if types != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise ConfigError(
            f"{keys.where}: expected mlp_layer_types of {num_layers} layers, dense ones and then sparse ones, "
            f"got {types}"
        )
    return first


def take_indexer_types(keys: ConfigKeys, num_layers: int) -> tuple[str, ...]:
    """ "full" or "shared" of each layer: by `indexer_types`, else by a pattern, else by a count and where it begins."""
    pattern = keys.take("index_topk_pattern", None)
    count, offset = max(int(keys.take("index_topk_freq", 1)), 1), int(keys.take("index_skip_topk_offset", 2))
    types = ["full" if max(i - offset + 1, 0) % count == 0 else "shared" for i in range(num_layers)]
    if pattern is not None:
        types = [_OF_LETTERS.get(letter, letter) for letter in pattern]
    given = keys.take("indexer_types", None)
    types = types if given is None else list(given)
    if len(types) < num_layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise ConfigError(
            f"{keys.where}: expected indexer_types of full and shared for each of {num_layers} layers, the first full, "
            f"got {types}"
        )
    return tuple(types[:num_layers])
