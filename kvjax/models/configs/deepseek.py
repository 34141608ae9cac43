"""DeepSeek V2 and V3: latent attention, experts behind the first dense layers. No jax.

Flow:    config.json -> [DeepseekV2Config, DeepseekV3Config] -> decoders.deepseek
         those with an indexer -> configs.deepseek_v32
Source:  transformers' configuration_deepseek_{v2,v3}.py, whose defaults files on the Hub leave out; arXiv 2405.04434
         and 2412.19437
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kvjax.core.spec import KVCacheSpec
from kvjax.models.configs.decoder import DecoderConfig, take_sizes
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.latent_attention import LatentAttentionConfig
from kvjax.models.configs.rope import RopeConfig, take_rope, yarn_mscale


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """What both have: a latent a token in every layer, experts from layer `first_expert_layer` on."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "aux_loss_alpha",
            "ep_size",
            "head_dim",  # of transformers: that of the rotated part
            "index_share_for_mtp_iteration",
            "num_mtp_layers",
            "qk_head_dim",
            "seq_aux",
        ]
    )

    attention: LatentAttentionConfig
    experts: ExpertsConfig
    shared_intermediate_size: int  # of the experts that every token has, as one; 0: there are none
    first_expert_layer: int
    num_prediction_layers: int = 0  # after the last, for tokens further on; not computed here
    router_bias: bool  # experts are chosen by score plus a bias
    indexed_layers: tuple[int, ...] = ()  # with an indexer; the others see what the last one before them picked
    unrotated_layers: tuple[int, ...] = ()
    source_layers: tuple[int, ...] = ()  # of each layer the one whose latents it reads; empty: all read their own

    @property
    def cache_words(self) -> str:
        """The latent of a layer, and the key of its indexer."""
        attention = self.attention
        latent = f"a latent of {attention.latent_dim + attention.rope_dim}"
        if attention.indexer is None:
            return latent
        layers = "" if len(self.indexed_layers) == self.num_layers else f" in {len(self.indexed_layers)} layers"
        return f"{latent}, an indexer's key of {attention.indexer.head_dim}{layers}"

    def attention_of(self, layer: int) -> LatentAttentionConfig:
        """Sizes of layer `layer`: without rotation its shared key is a part of each head's own."""
        attention = self.attention
        if layer not in self.unrotated_layers:
            return attention
        return replace(attention, nope_dim=attention.key_dim, rope_dim=0, rope=None)

    @property
    def shared_layers(self) -> dict[str, str]:
        """Layers that read the pages of another layer, with that layer."""
        return {f"layers.{i}": f"layers.{source}" for i, source in enumerate(self.source_layers) if source != i}

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The shared key's, if it is rotated."""
        return () if self.attention.rope is None else (self.attention.rope,)

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Tensors of layers that predict further tokens."""
        return tuple(f"layers.{self.num_layers + i}." for i in range(self.num_prediction_layers))

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer by its name, `layers.{i}`, and `layers.{i}.indexer` of its indexer's keys.

        `dtype` None: the model's own.
        """
        block_size, dtype = block_size or self.default_block_size, dtype or self.dtype
        latents: dict[str, KVCacheSpec] = {
            f"layers.{i}": self.attention_of(i).spec(block_size, dtype)
            for i in range(self.num_layers)
            if f"layers.{i}" not in self.shared_layers
        }
        if self.attention.indexer is None:
            return latents
        keys = self.attention.indexer.spec(block_size, dtype)
        return latents | {f"layers.{i}.indexer": keys for i in self.indexed_layers}

    @property
    def split_units(self) -> Mapping[str, int]:
        """Heads, and columns of feed-forward layers and experts."""
        return {
            "query heads": self.attention.num_heads,
            "feed-forward columns": self.intermediate_size,
            "columns of an expert": self.experts.intermediate_size,
        }

    def splits_cache(self, num_shards: int) -> bool:
        """Whether devices share the query heads, each with all latents."""
        return self.attention.num_heads % num_shards == 0


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """Experts by softmax; groups of experts rank by their best one."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        method = keys.take_choice("topk_method", ("greedy", "group_limited_greedy"))
        keys.take_choice("scoring_func", ("softmax",), "softmax")
        keys.refuse("norm_topk_prob", "transformers does not apply it in DeepSeek V2, so its meaning is not known")
        groups = take_groups(keys)
        return cls(
            **take_deepseek_fields(keys),
            mlp_bias=keys.take_flag("mlp_bias", False),
            experts=ExpertsConfig(
                **take_expert_sizes(keys),
                **(groups if method == "group_limited_greedy" else {}),
                norm_topk=False,
                group_best=1,
                scale=keys.take_float("routed_scaling_factor", 1.0),
            ),
            router_bias=False,
        )


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """Experts by sigmoid, chosen with a bias; groups of experts rank by their two best ones."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        return cls(**take_v3_fields(keys))


def take_v3_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of DeepSeek V3, which those with an indexer have too."""
    keys.take_choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.take_choice("scoring_func", ("sigmoid",), "sigmoid")
    return {
        **take_deepseek_fields(keys),
        "experts": ExpertsConfig(
            **take_expert_sizes(keys),
            **take_groups(keys),
            norm_topk=keys.take_flag("norm_topk_prob", True),
            score="sigmoid",
            scale=keys.take_float("routed_scaling_factor", 2.5),
        ),
        "router_bias": True,
    }


def take_deepseek_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields that V2 and V3 share, the choice of experts apart."""
    sizes = take_sizes(keys)
    keys.require("moe_layer_freq", 1)
    keys.require("num_key_value_heads", keys.take_int("num_attention_heads"))  # all are made of one latent
    num_shared = keys.take_int("n_shared_experts") if keys.take("n_shared_experts") else 0
    return {
        **sizes,
        "intermediate_size": keys.take_int("intermediate_size"),
        "attention": take_latent_attention(keys, take_rope(keys, sizes["max_model_len"])),
        "shared_intermediate_size": num_shared * keys.take_int("moe_intermediate_size"),
        "first_expert_layer": keys.take_index("first_k_dense_replace"),
        "num_prediction_layers": keys.take("num_nextn_predict_layers", 0),
    }


def take_latent_attention(keys: ConfigKeys, rope: RopeConfig) -> LatentAttentionConfig:
    """Sizes of the attention; YaRN's temperature goes on its scores."""
    nope_dim, rope_dim = keys.take_int("qk_nope_head_dim"), keys.take_int("qk_rope_head_dim")
    temperature = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    rank = keys.take_nullable("q_lora_rank")
    return LatentAttentionConfig(
        num_heads=keys.take_int("num_attention_heads"),
        query_rank=None if rank is None else keys.take_int("q_lora_rank"),
        latent_dim=keys.take_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.take_int("v_head_dim"),
        sm_scale=(nope_dim + rope_dim) ** -0.5 * temperature**2,
        rope=rope,
        rope_interleaved=keys.take_flag("rope_interleave", True),
        bias=keys.take_flag("attention_bias", False),
    )


def take_expert_sizes(keys: ConfigKeys) -> dict[str, Any]:
    """How many experts there are, are taken, and how wide they are."""
    return {
        "num_experts": keys.take_int("n_routed_experts"),
        "top_k": keys.take_int("num_experts_per_tok"),
        "intermediate_size": keys.take_int("moe_intermediate_size"),
    }


def take_groups(keys: ConfigKeys) -> dict[str, Any]:
    """Groups of experts, of which the best are taken from."""
    return {"num_groups": keys.take_int("n_group", 1), "top_groups": keys.take_int("topk_group", 1)}
