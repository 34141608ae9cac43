"""What recurrent layers compute over their states: a short convolution, and a scan or the gated delta rule.

Flow:    a layer's inputs -> [convolve_states, scan_states, apply_delta_rule] -> StepCache.update_states -> outputs
Source:  pallas_kernels.ssm_update, pallas_kernels.gated_delta_rule

On a mesh every device has the states of its channels or heads, and the inputs that belong to them.
"""

from __future__ import annotations

import jax

from kvjax.device.layers.state_update import RecurrentStep
from kvjax.device.layers.step_cache import StepCache
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.ssm_update import causal_conv1d, selective_scan


def convolve_states(
    cache: StepCache,
    layer_name: str,
    x: jax.Array,  # [T, C]
    weight: jax.Array,  # [C, W] the last tap is the token's own
    bias: jax.Array | None = None,  # [C]
    *,
    array: int = 0,  # of the layer's arrays of states [pages, C, W - 1]
) -> jax.Array:  # [T, C]
    """SiLU of every channel's convolution over its last W inputs."""

    def convolve(states: Column, step: RecurrentStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        x, weight, *bias = inputs
        result = causal_conv1d(x, states[0], weight, *step, bias=bias[0] if bias else None, backend=cache.backend)
        return result.out, (result.states,)

    inputs = (x, weight) if bias is None else (x, weight, bias)
    return cache.update_states(layer_name, convolve, inputs, (1, 0, 0)[: len(inputs)], arrays=(array,))


def scan_states(
    cache: StepCache,
    layer_name: str,
    x: jax.Array,  # Mamba 1: [T, H]; Mamba 2: [T, H, P]
    dt: jax.Array,  # [T, H] before softplus
    a: jax.Array,  # Mamba 1: [H, N]; Mamba 2: [H]; negative
    b: jax.Array,  # Mamba 1: [T, N]; Mamba 2: [T, G, N]
    c: jax.Array,  # as b
    d: jax.Array,  # [H]
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    array: int = 1,  # of the layer's arrays of states [pages, H, N] or [pages, H, P, N]
) -> jax.Array:  # as x
    """The selective scan; groups of heads are split with their heads, one group is whole on every device."""

    def scan(states: Column, step: RecurrentStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        x, dt, a, b, c, d = inputs
        result = selective_scan(x, states[0], dt, a, b, c, *step, d=d, dt_limit=dt_limit, backend=cache.backend)
        return result.out, (result.states,)

    groups = 1 if b.ndim == 3 and b.shape[1] > 1 else None
    head_dims = (1, 1, 0, groups, groups, 0)
    return cache.update_states(layer_name, scan, (x, dt, a, b, c, d), head_dims, arrays=(array,))


def apply_delta_rule(
    cache: StepCache,
    layer_name: str,
    q: jax.Array,  # [T, G, K]
    k: jax.Array,  # [T, G, K]
    v: jax.Array,  # [T, H, V]
    g: jax.Array,  # [T, H] logarithm of the decay; of every number of the key: [T, H, K]
    beta: jax.Array,  # [T, H] how much of the difference is written
    *,
    array: int = 1,  # of the layer's arrays of states [pages, H, K, V]
) -> jax.Array:  # [T, H, V]
    """The gated delta rule of queries and keys of length 1; key heads are split with their value heads."""

    def rule(states: Column, step: RecurrentStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        q, k, v, g, beta = inputs
        result = gated_delta_rule(q, k, v, g, beta, states[0], *step, use_qk_l2norm=True, backend=cache.backend)
        return result.out, (result.states,)

    return cache.update_states(layer_name, rule, (q, k, v, g, beta), (1,) * 5, arrays=(array,))


__all__ = ["apply_delta_rule", "convolve_states", "scan_states"]
