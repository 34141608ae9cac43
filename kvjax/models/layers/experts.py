"""A feed-forward part of experts: each token is computed by the few that its router scores highest.

Flow:    hidden[T, d] -> [choose_experts] -> weights, experts [T, k] -> [Experts] -> hidden[T, d]
Source:  Mixtral (arXiv 2401.04088); scores and groups of DeepSeek V3 (arXiv 2412.19437, section 2.1.2)

Tokens are sorted by expert, so that every expert multiplies its own rows once (`jax.lax.ragged_dot`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.layers.feed_forward import ACTIVATIONS
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import Stack, TensorSource


def choose_experts(
    logits: jax.Array,  # [T, E] of the router
    config: ExpertsConfig,
    bias: jax.Array | None = None,  # float32[E] added to the scores for choosing only
) -> tuple[jax.Array, jax.Array]:  # float32[T, k] weights, int32[T, k] experts
    """The experts of each token, best first, and how much each counts."""
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1) if config.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias[None].astype(jnp.float32)
    if config.num_groups > 1:
        ranked = _in_top_groups(ranked, config)
    experts = jax.lax.top_k(ranked, config.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk:
        weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return weights * config.scale, experts


def _in_top_groups(ranked: jax.Array, config: ExpertsConfig) -> jax.Array:  # float32[T, E] -> [T, E]
    """0 for the experts of all but the best groups, a group's rank being the sum of its two best."""
    grouped = ranked.reshape(ranked.shape[0], config.num_groups, -1)
    ranks = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    groups = jax.lax.top_k(ranks, config.top_groups)[1]
    is_chosen = jax.nn.one_hot(groups, config.num_groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, 0.0).reshape(ranked.shape)


def run_experts(
    hidden: jax.Array,  # [T, d]
    weights: jax.Array,  # float32[T, k]
    experts: jax.Array,  # int32[T, k]
    num_experts: int,
    compute: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:  # [T, d]
    """The weighted sum of what each token's experts make of it.

    `compute(rows[T * k, d], group_sizes[E], experts[T * k])` gets the rows of expert 0, then those of expert 1, and so
    on, and gives [T * k, d].
    """
    num_tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    out = compute(hidden[order // top_k], sizes, flat[order])
    weighted = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    back = jnp.argsort(order, stable=True)
    return weighted[back].reshape(num_tokens, top_k, -1).sum(axis=1).astype(hidden.dtype)


class Experts(nnx.Module):
    """`down(act(gate(x)) * up(x))` of every expert, the projections of all in one array."""

    def __init__(
        self,
        size: int,
        config: ExpertsConfig,
        *,
        activation: str,
        make: Make,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),  # of an expert's tensors
    ) -> None:
        inner, count = config.intermediate_size, config.num_experts
        self.gate = make.param(count, size, inner, scale=size**-0.5)
        self.up = make.param(count, size, inner, scale=size**-0.5)
        self.down = make.param(count, inner, size, scale=inner**-0.5)
        self.num_experts = count
        self.activation = activation
        self.names = names

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Columns of gate and up, rows of down, as in a dense part."""
        inner = self.down.shape[1]
        return {"gate": (2, inner), "up": (2, inner), "down": (1, inner)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A tensor for each expert and projection."""
        return {
            name: Stack(tuple(f"{expert}.{tensor}.weight" for expert in range(self.num_experts)))
            for name, tensor in zip(("gate", "up", "down"), self.names, strict=True)
        }

    def __call__(self, hidden: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:  # -> [T, d]
        """As `run_experts`."""

        def compute(rows: jax.Array, sizes: jax.Array, expert_of_row: jax.Array) -> jax.Array:
            del expert_of_row
            gate = ACTIVATIONS[self.activation](jax.lax.ragged_dot(rows, self.gate[...], sizes))
            return jax.lax.ragged_dot(gate * jax.lax.ragged_dot(rows, self.up[...], sizes), self.down[...], sizes)

        return run_experts(hidden, weights, experts, self.num_experts, compute)


class SparseFeedForward(nnx.Module):
    """A router and its experts."""

    def __init__(
        self,
        size: int,
        config: ExpertsConfig,
        *,
        activation: str,
        make: Make,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),  # of an expert's tensors
    ) -> None:
        self.gate = make.linear(size, config.num_experts)
        self.experts = Experts(size, config, activation=activation, make=make, names=names)
        self.config = config

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        return self.experts(hidden, *choose_experts(self.gate(hidden), self.config))
