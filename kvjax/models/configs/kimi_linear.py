"""Kimi Linear: Kimi Delta Attention, every fourth layer latent attention without positions; experts. No jax.

Flow:    config.json -> [KimiLinearConfig] -> decoders.kimi_linear
Source:  transformers' configuration_kimi_linear.py, whose defaults files on the Hub leave out; arXiv 2510.26692
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.decoder import take_sizes
from kvjax.models.configs.deepseek import DeepseekConfig, take_expert_sizes, take_groups
from kvjax.models.configs.delta import KimiDeltaConfig
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.latent_attention import LatentAttentionConfig


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DeepseekConfig):
    """DeepSeek V3's experts and attention, the latter without rotation and in a few layers only.

    The output head has weights of its own, whatever `tie_word_embeddings` says: transformers ties none here.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 163_584,
        "eos_token_id": 163_586,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    ignored_keys: ClassVar[frozenset[str]] = DeepseekConfig.ignored_keys | {
        "rope_parameters",  # nothing is rotated
        "rope_scaling",
        "rope_theta",
        "use_grouped_topk",
    }

    layer_types: tuple[str, ...]  # per layer: FULL or RECURRENT
    kda: KimiDeltaConfig

    @property
    def cache_words(self) -> str:
        """The latent of a layer, and how many layers have states instead."""
        latent = self.attention.latent_dim + self.attention.rope_dim
        return f"a latent of {latent}, {self.layer_types.count(RECURRENT)} layers with states"

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        sizes = take_sizes(keys) | {"tie_word_embeddings": False}
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolutions
        keys.take_choice("moe_router_activation_func", ("sigmoid",), "sigmoid")
        for key, wanted in (("mla_use_nope", True), ("moe_layer_freq", 1)):
            keys.require(key, wanted)
        keys.require("num_key_value_heads", keys.take_int("num_attention_heads"))
        kda, layer_types = take_kda(keys, sizes["num_layers"])
        num_shared = keys.take_int("n_shared_experts") if keys.take("n_shared_experts") else 0
        return cls(
            **sizes,
            intermediate_size=keys.take_int("intermediate_size"),
            attention=take_unrotated_attention(keys),
            experts=ExpertsConfig(
                **take_expert_sizes(keys),
                **take_groups(keys),
                norm_topk=keys.take_flag("norm_topk_prob", True),
                score="sigmoid",
                scale=keys.take_float("routed_scaling_factor", 2.446),
            ),
            shared_intermediate_size=num_shared * keys.take_int("moe_intermediate_size"),
            first_expert_layer=take_first_expert_layer(keys, sizes["num_layers"]),
            num_prediction_layers=keys.take("num_nextn_predict_layers", 0),
            router_bias=True,
            layer_types=layer_types,
            kda=kda,
        )

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer by its name, `layers.{i}`; `dtype` None: the model's own."""
        latent = self.attention.spec(block_size or self.default_block_size, dtype or self.dtype)
        state = self.kda.state.spec(latent.block_size, latent.page_size_bytes // latent.block_size, self.dtype)
        return {f"layers.{i}": latent if kind == FULL else state for i, kind in enumerate(self.layer_types)}

    def splits_cache(self, num_shards: int) -> bool:
        """Whether devices share the query heads and the heads of states."""
        return self.attention.num_heads % num_shards == 0 and self.kda.state.splits(num_shards)


def take_unrotated_attention(keys: ConfigKeys) -> LatentAttentionConfig:
    """Sizes of the attention."""
    nope_dim, rope_dim = keys.take_int("qk_nope_head_dim"), keys.take_int("qk_rope_head_dim")
    return LatentAttentionConfig(
        num_heads=keys.take_int("num_attention_heads"),
        query_rank=None if keys.take_nullable("q_lora_rank") is None else keys.take_int("q_lora_rank"),
        latent_dim=keys.take_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.take_int("v_head_dim"),
        sm_scale=(nope_dim + rope_dim) ** -0.5,
        bias=keys.take_flag("attention_bias", False),
    )


def take_kda(keys: ConfigKeys, num_layers: int) -> tuple[KimiDeltaConfig, tuple[str, ...]]:
    """Sizes of Kimi Delta Attention, and each layer's type: `linear_attn_config` of files on the Hub goes first."""
    where = f"{keys.where}: linear_attn_config"
    hub = ConfigKeys(keys.take_object("linear_attn_config") or {}, {}, where)
    config = KimiDeltaConfig(
        num_heads=hub.take_int("num_heads", keys.take_int("linear_num_heads")),
        head_dim=hub.take_int("head_dim", keys.take_int("linear_head_dim")),
        num_taps=hub.take_int("short_conv_kernel_size", keys.take_int("linear_conv_kernel_dim"), MAX_TAPS),
    )
    default = tuple(FULL if i and i % 4 == 0 else RECURRENT for i in range(num_layers))
    full, recurrent = (hub.take_ints(key) if hub.given(key) else () for key in ("full_attn_layers", "kda_layers"))
    hub.finish(frozenset())
    if full or recurrent:
        if sorted([*full, *recurrent]) != list(range(1, num_layers + 1)):
            raise ConfigError(f"{where}: expected layers 1 to {num_layers} once each, got {full} and {recurrent}")
        default = tuple(FULL if i + 1 in full else RECURRENT for i in range(num_layers))
    return config, keys.take_layer_types(default, (FULL, RECURRENT))


def take_first_expert_layer(keys: ConfigKeys, num_layers: int) -> int:
    """`first_k_dense_replace`, or what `mlp_layer_types` of newer files says."""
    first = min(keys.take("first_k_dense_replace", 1), num_layers)
    default = ["dense"] * first + ["sparse"] * (num_layers - first)
    types = keys.take("mlp_layer_types", default)
    first = types.count("dense")
    if types != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise ConfigError(f"{keys.where}: expected mlp_layer_types to be dense, then sparse, got {types}")
    return first
