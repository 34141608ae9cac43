"""A feed-forward part of experts: each token is computed by the few that its router scores highest.

Flow:    hidden[T, d] -> [choose_experts] -> weights, experts [T, k] -> [Experts] -> hidden[T, d]
Source:  Mixtral (arXiv 2401.04088); scores and groups of DeepSeek V3 (arXiv 2412.19437, section 2.1.2)

Tokens are sorted by expert, so that every expert multiplies its own rows once (`jax.lax.ragged_dot`). XLA would sum
over devices behind each projection, k rows a token; here every device first adds up its parts of a token's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from kvjax.device.mesh.placement import DATA_AXIS, TENSOR_AXIS
from kvjax.models.configs.experts import APART, COLUMNS, ROWS, ExpertsConfig
from kvjax.models.layers.feed_forward import ACTIVATIONS, gated
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import Either, Part, Stack, TensorSource, Whole


def choose_experts(
    logits: jax.Array,  # [T, E] of the router
    config: ExpertsConfig,
    bias: jax.Array | None = None,  # float32[E] added to the scores for choosing only
) -> tuple[jax.Array, jax.Array]:  # float32[T, k] weights, int32[T, k] experts
    """The experts of each token, best first, and how much each counts."""
    scores = router_scores(logits, config)
    ranked = scores if bias is None else scores + bias[None].astype(jnp.float32)
    if config.num_groups > 1:
        ranked = _in_top_groups(ranked, config)
    experts = jax.lax.top_k(ranked, config.top_k)[1]
    return expert_weights(scores, experts, config), experts


def router_logits(hidden: jax.Array, kernel: jax.Array) -> jax.Array:  # [T, d], [d, E] -> float32[T, E]
    """What a router's scores are made of, not rounded to the dtype of `hidden`."""
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


def router_scores(logits: jax.Array, config: ExpertsConfig) -> jax.Array:  # [T, E] -> float32[T, E]
    """What the router thinks of every expert."""
    logits = logits.astype(jnp.float32)
    match config.score:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case _:
            return jnp.sqrt(jax.nn.softplus(logits))


def expert_weights(scores: jax.Array, experts: jax.Array, config: ExpertsConfig) -> jax.Array:  # -> float32[T, k]
    """How much each of a token's chosen `experts` int32[T, k] counts, by the `scores` [T, E] of all."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk:
        total = weights.sum(axis=-1, keepdims=True) + config.norm_eps
        weights = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return weights * config.scale


def _in_top_groups(ranked: jax.Array, config: ExpertsConfig) -> jax.Array:  # float32[T, E] -> [T, E]
    """-inf for the experts of all but the best groups."""
    grouped = ranked.reshape(ranked.shape[0], config.num_groups, -1)
    ranks = jax.lax.top_k(grouped, config.group_best)[0].sum(axis=-1)
    groups = jax.lax.top_k(ranks, config.top_groups)[1]
    is_chosen = jax.nn.one_hot(groups, config.num_groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


class ExpertParam(NamedTuple):
    """A parameter of all experts, and its dimension that devices split as `param_splits` has it; None: whole."""

    values: jax.Array
    dim: int | None


def run_experts(
    hidden: jax.Array,  # [T, d]
    weights: jax.Array,  # float32[T, k]
    experts: jax.Array,  # int32[T, k]
    params: Sequence[ExpertParam],
    compute: Callable[..., jax.Array],
) -> jax.Array:  # [T, d]
    """The weighted sum of what each token's experts make of it.

    `compute(params, rows[T * k, d], group_sizes[E], experts[T * k])` gets the rows of expert 0, then those of expert 1,
    and so on, and gives [T * k, d]. On a mesh that a step is traced for, each device computes what its part of the
    params adds to its tokens, and the devices sum one row a token.
    """
    num_experts = params[0].values.shape[0]

    def run(params: Sequence[jax.Array], hidden: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        num_tokens, top_k = experts.shape
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
        out = compute(params, hidden[order // top_k], sizes, flat[order])
        weighted = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        back = jnp.argsort(order, stable=True)
        return weighted[back].reshape(num_tokens, top_k, -1).sum(axis=1).astype(hidden.dtype)

    return split_experts(run, params, hidden, weights, experts)


def split_experts(
    run: Callable[..., jax.Array],
    params: Sequence[ExpertParam],
    *tokens: jax.Array,  # [T, ...]
) -> jax.Array:  # [T, d]
    """`run(params, *tokens)` on the devices of the mesh that is traced for: a part of params and of tokens each."""
    values = [param.values for param in params]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(values, *tokens)
    sizes = {axis: mesh.shape[axis] for axis in (TENSOR_AXIS, DATA_AXIS) if axis in mesh.axis_names}
    is_split = TENSOR_AXIS in sizes and all(
        param.values.shape[param.dim] % sizes[TENSOR_AXIS] == 0 for param in params if param.dim is not None
    )
    data = DATA_AXIS if DATA_AXIS in sizes and tokens[0].shape[0] % sizes[DATA_AXIS] == 0 else None

    def spec(param: ExpertParam) -> PartitionSpec:
        return PartitionSpec() if param.dim is None or not is_split else PartitionSpec(*[None] * param.dim, TENSOR_AXIS)

    def own(values: Sequence[jax.Array], *tokens: jax.Array) -> jax.Array:
        out = run(values, *tokens)
        return jax.lax.psum(out, TENSOR_AXIS) if is_split else out

    rows = PartitionSpec(data)
    specs = (list(map(spec, params)), *(rows,) * len(tokens))
    return jax.shard_map(own, in_specs=specs, out_specs=rows, check_vma=False)(values, *tokens)


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
        layouts: tuple[str, ...] = (APART,),  # that checkpoints have; of several the first that fits
    ) -> None:
        inner, count = config.intermediate_size, config.num_experts
        self.gate = make.param(count, size, inner, scale=size**-0.5)
        self.up = make.param(count, size, inner, scale=size**-0.5)
        self.down = make.param(count, inner, size, scale=inner**-0.5)
        self.num_experts = count
        self.activation = activation
        self.limit = config.limit
        self.names = names
        self.layouts = layouts

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Columns of gate and up, rows of down, as in a dense part."""
        inner = self.down.shape[1]
        return {"gate": (2, inner), "up": (2, inner), "down": (1, inner)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A tensor for each expert and projection, or one of all, `gate_up_proj` and `down_proj`."""
        apart: dict[str, TensorSource] = {
            name: Stack(tuple(f"{expert}.{tensor}.weight" for expert in range(self.num_experts)))
            for name, tensor in zip(("gate", "up", "down"), self.names, strict=True)
        }
        ways = {APART: apart, ROWS: self._as_one(1, transposed=True), COLUMNS: self._as_one(2, transposed=False)}
        return {name: Either(tuple(ways[way][name] for way in self.layouts)) for name in apart}

    def _as_one(self, axis: int, *, transposed: bool) -> dict[str, TensorSource]:
        inner = self.up.shape[2]
        return {
            "gate": Part("gate_up_proj", 0, 2 * inner, transposed, axis),
            "up": Part("gate_up_proj", inner, 2 * inner, transposed, axis),
            "down": Whole("down_proj", transposed),
        }

    def __call__(self, hidden: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:  # -> [T, d]
        """As `run_experts`."""

        def compute(
            params: Sequence[jax.Array], rows: jax.Array, sizes: jax.Array, expert_of_row: jax.Array
        ) -> jax.Array:
            del expert_of_row
            gate, up = (jax.lax.ragged_dot(rows, param, sizes) for param in params[:2])
            return jax.lax.ragged_dot(gated(gate, up, self.activation, self.limit), params[2], sizes)

        params = [ExpertParam(self.gate[...], 2), ExpertParam(self.up[...], 2), ExpertParam(self.down[...], 1)]
        return run_experts(hidden, weights, experts, params, compute)


class PlainExperts(nnx.Module):
    """`down(act(up(x)))` of every expert, the projections of all in one array."""

    def __init__(self, size: int, config: ExpertsConfig, *, activation: str, make: Make) -> None:
        inner, count = config.intermediate_size, config.num_experts
        self.up = make.param(count, size, inner, scale=size**-0.5)
        self.down = make.param(count, inner, size, scale=inner**-0.5)
        self.num_experts = count
        self.activation = activation

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Columns of up, rows of down, as in a dense part."""
        inner = self.down.shape[1]
        return {"up": (2, inner), "down": (1, inner)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A tensor for each expert and projection."""
        return {
            name: Stack(tuple(f"{expert}.{name}_proj.weight" for expert in range(self.num_experts)))
            for name in ("up", "down")
        }

    def __call__(self, hidden: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:  # -> [T, d]
        """As `run_experts`."""

        def compute(
            params: Sequence[jax.Array], rows: jax.Array, sizes: jax.Array, expert_of_row: jax.Array
        ) -> jax.Array:
            del expert_of_row
            up = ACTIVATIONS[self.activation](jax.lax.ragged_dot(rows, params[0], sizes))
            return jax.lax.ragged_dot(up, params[1], sizes)

        return run_experts(
            hidden, weights, experts, [ExpertParam(self.up[...], 2), ExpertParam(self.down[...], 1)], compute
        )


class Router(nnx.Module):
    """Scores experts for a token. With a bias, experts are chosen by score plus bias and weighted by score."""

    def __init__(self, size: int, config: ExpertsConfig, *, make: Make, has_bias: bool = False) -> None:
        self.kernel = make.param(size, config.num_experts, scale=size**-0.5)
        self.e_score_correction_bias = make.float32_zeros(config.num_experts) if has_bias else None
        self.config = config

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:  # float32[T, k] weights, int32[T, k] experts
        """As `choose_experts`."""
        bias = self.e_score_correction_bias
        return choose_experts(router_logits(hidden, self.kernel[...]), self.config, None if bias is None else bias[...])


class SparseFeedForward(nnx.Module):
    """A router and its experts, and a part that computes every token beside them if there are `shared_experts`."""

    def __init__(
        self,
        size: int,
        config: ExpertsConfig,
        *,
        activation: str,
        make: Make,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),  # of an expert's tensors
        layouts: tuple[str, ...] = (APART,),  # as of `Experts`
        has_bias: bool = False,  # of the router
        shared_experts: Callable[[jax.Array], jax.Array] | None = None,
    ) -> None:
        self.gate = Router(size, config, make=make, has_bias=has_bias)
        self.experts = Experts(size, config, activation=activation, make=make, names=names, layouts=layouts)
        self.shared_experts = shared_experts

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        out = self.experts(hidden, *self.gate(hidden))
        return out if self.shared_experts is None else out + self.shared_experts(hidden)
