"""Nemotron-H: Mamba 2, attention, dense parts and experts, each a layer of its own. No jax.

Flow:    config.json -> [NemotronHConfig] -> decoders.nemotron_h
Source:  transformers' configuration_nemotron_h.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.config import FEED_FORWARD, FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.deepseek import take_expert_sizes, take_groups
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.mamba import Mamba2Config
from kvjax.models.configs.states import take_state_dtype

_OF_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER_TYPES = {
    "mamba": RECURRENT,
    "attention": FULL,
    "mlp": FEED_FORWARD,
    "moe": FEED_FORWARD,
    RECURRENT: RECURRENT,
    FULL: FULL,
}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(AttentionDecoderConfig):
    """`hybrid_override_pattern` has a letter for each layer, `layers_block_type` of newer files a name.

    The output head has weights of its own, whatever `tie_word_embeddings` says: transformers ties none here.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {
        "attention_head_dim": "head_dim",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_n_groups": "n_groups",
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "chunk_size",
            "expand",  # heads and their dimension say it
            "hidden_dropout",
            "mamba_chunk_size",
            "mamba_dt_init_floor",
            "mamba_dt_limit",
            "mamba_dt_max",
            "mamba_expand",
            "mamba_proj_bias",  # transformers writes it and reads `use_bias`
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "n_shared_experts",  # one, of `moe_shared_expert_intermediate_size`
            "norm_eps",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "partial_rotary_factor",  # nothing is rotated
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rope_theta",
            "time_step_floor",
            "time_step_limit",  # `time_step_min` is the one that counts
            "time_step_max",
            "time_step_rank",
            "use_mamba_kernels",
        ]
    )

    mamba: Mamba2Config
    experts: ExpertsConfig
    expert_layers: tuple[bool, ...]  # per layer: whether it is one of experts
    expert_size: int  # of what experts take and give; else than `hidden_size`: between two projections
    shared_intermediate_size: int  # of the part that all tokens share beside the experts

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        names = take_layer_names(keys)
        fields = take_decoder_fields(keys, activation_key="mlp_hidden_act", num_layers=len(names))
        keys.take_choice("mamba_hidden_act", ("silu",), "silu")
        keys.refuse("attention_bias", "transformers does not apply it in Nemotron-H, so its meaning is not known")
        keys.refuse("sliding_window", "attention layers see all")
        mamba = take_mamba2(keys)
        return cls(
            **fields | {"rms_norm_eps": keys.take_float("layer_norm_epsilon", 1e-5), "tie_word_embeddings": False},
            mlp_bias=keys.take_flag("mlp_bias", False),
            layer_types=tuple(_LAYER_TYPES[name] for name in names),
            rope=None,
            state=mamba.state,
            mamba=mamba,
            experts=ExpertsConfig(
                **take_expert_sizes(keys),
                **take_groups(keys),
                norm_topk=keys.take_flag("norm_topk_prob", True),
                score="sigmoid",
                scale=keys.take_float("routed_scaling_factor", 1.0),
            ),
            expert_layers=tuple(name == "moe" for name in names),
            expert_size=keys.take_int("moe_latent_size", fields["hidden_size"]),
            shared_intermediate_size=keys.take_int("moe_shared_expert_intermediate_size", 7688),
        )


def take_layer_names(keys: ConfigKeys) -> list[str]:
    """What each layer is."""
    pattern = keys.take("hybrid_override_pattern", None)
    default = None if pattern is None else [_OF_PATTERN.get(letter, letter) for letter in pattern]
    names: list[str] = keys.take("layers_block_type") if default is None else keys.take("layers_block_type", default)
    unknown = sorted(set(names) - set(_LAYER_TYPES))
    if unknown or not names:
        raise ConfigError(
            f"{keys.where}: expected layers among {', '.join(_LAYER_TYPES)} (letters {''.join(_OF_PATTERN)}), "
            f"got {', '.join(unknown) or 'none'}"
        )
    count = keys.take("num_hidden_layers", len(names))
    if count != len(names):
        raise ConfigError(
            f"{keys.where}: expected num_hidden_layers to be {len(names)}, as many as are named, got {count}"
        )
    return names


def take_mamba2(keys: ConfigKeys) -> Mamba2Config:
    """Sizes of the Mamba layers; the recurrence's state is in float32 unless the file says otherwise, as in vLLM."""
    return Mamba2Config(
        num_heads=keys.take_int("mamba_num_heads", 128),
        head_dim=keys.take_int("mamba_head_dim", 64),
        num_groups=keys.take_int("n_groups", 8),
        state_dim=keys.take_int("ssm_state_size", 128),
        num_taps=keys.take_int("conv_kernel", 4, most=MAX_TAPS),
        conv_bias=keys.take_flag("use_conv_bias", True),
        proj_bias=keys.take_flag("use_bias", False),
        dt_limit=(keys.take_float("time_step_min", 0.001), float("inf")),
        scan_dtype=take_state_dtype(keys, "mamba_ssm_cache_dtype", "float32"),
    )
