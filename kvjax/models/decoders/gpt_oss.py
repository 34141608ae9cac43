"""GPT-OSS.

Flow:    GptOssConfig -> [GptOssDecoder]
Source:  transformers' modeling_gpt_oss.py, with whose outputs it agrees; arXiv 2508.10925
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.gpt_oss import GptOssConfig
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import ExpertParam, choose_experts, run_experts
from kvjax.models.layers.make import Make


class GptOssExperts(nnx.Module):
    """All experts; gate and up are one projection, whose outputs are a gate and what it multiplies in turn."""

    def __init__(self, config: GptOssConfig, make: Make) -> None:
        count, size, inner = config.experts.num_experts, config.hidden_size, config.experts.intermediate_size
        self.gate_up_proj = make.param(count, size, 2 * inner, scale=size**-0.5)
        self.gate_up_proj_bias = make.zeros(count, 2 * inner)
        self.down_proj = make.param(count, inner, size, scale=inner**-0.5)
        self.down_proj_bias = make.zeros(count, size)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Pairs of columns of gate and up, rows of down."""
        inner = self.down_proj.shape[1]
        return {"gate_up_proj": (2, inner), "gate_up_proj_bias": (1, inner), "down_proj": (1, inner)}

    def __call__(self, hidden: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:  # -> [T, d]
        """As `run_experts`."""

        def compute(
            params: Sequence[jax.Array], rows: jax.Array, sizes: jax.Array, expert_of_row: jax.Array
        ) -> jax.Array:
            gate_up, gate_up_bias, down = params
            both = jax.lax.ragged_dot(rows, gate_up, sizes) + gate_up_bias[expert_of_row]
            gate = jnp.minimum(both[:, ::2], self.limit)
            up = jnp.clip(both[:, 1::2], -self.limit, self.limit)
            inner = (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
            return jax.lax.ragged_dot(inner, down, sizes)

        params = [
            ExpertParam(self.gate_up_proj[...], 2),
            ExpertParam(self.gate_up_proj_bias[...], 1),
            ExpertParam(self.down_proj[...], 1),
        ]
        bias = jnp.einsum("tk,tkd->td", weights, self.down_proj_bias[...][experts].astype(jnp.float32))
        return run_experts(hidden, weights, experts, params, compute) + bias.astype(hidden.dtype)


class GptOssFeedForward(nnx.Module):
    """A router and its experts."""

    def __init__(self, config: GptOssConfig, make: Make) -> None:
        self.router = make.linear(config.hidden_size, config.experts.num_experts, bias=True)
        self.experts = GptOssExperts(config, make)
        self.config = config.experts

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        return self.experts(hidden, *choose_experts(self.router(hidden), self.config))


class GptOssDecoder(Decoder):
    """Attention with sinks and experts, each behind a norm."""

    @staticmethod
    def make_layer(config: GptOssConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return PreNormBlock(config, make, self_attn=Attention(config, layer, make), mlp=GptOssFeedForward(config, make))
