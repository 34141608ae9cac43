"""What recurrent layers compute over their states: a short convolution, and a scan or the gated delta rule.

Flow:    a layer's inputs -> [convolve_states, scan_states, apply_delta_rule] -> StepCache.update_states -> outputs
Source:  pallas_kernels.ssm_update, pallas_kernels.gated_delta_rule; over rings ring_scan, ring_delta_rule

On a mesh every device has the states of its channels or heads, and the inputs that belong to them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.device.layers.ring_states import (
    Output,
    OutputOverRing,
    PlainOp,
    RingOp,
    RingSizes,
    convolve_in_ring,
    update_in_ring,
)
from kvjax.device.layers.state_update import AnyStep, RecurrentStep, StepOverRings
from kvjax.device.layers.step_cache import StepCache
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.ring_delta_rule import DeltaRing, ring_delta_rule
from pallas_kernels.ring_scan import ScanRing, ring_scan
from pallas_kernels.ssm_update import causal_conv1d, selective_scan


def convolve_states(
    cache: StepCache,
    layer_name: str,
    x: jax.Array,  # [T, C]
    weight: jax.Array,  # [C, W] the last tap is the token's own
    bias: jax.Array | None = None,  # [C]
    *,
    activation: str | None = "silu",  # or None
    array: int = 0,  # of the layer's arrays of states [pages, C, W - 1]
) -> jax.Array:  # [T, C]
    """Every channel's convolution over its last W inputs, then the activation."""

    def convolve(states: Column, step: AnyStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        x, weight, *more = inputs
        bias = more[0] if more else None
        if isinstance(step, StepOverRings):
            out, windows = convolve_in_ring(states[0], step, x, weight, bias, **options)
            return out, (windows,)
        result = causal_conv1d(x, states[0], weight, *step, bias=bias, **options)
        return result.out, (result.states,)

    options: dict[str, Any] = {"activation": activation, "backend": cache.backend}
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

    def scan(states: Column, step: AnyStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        x, dt, a, b, c, d = inputs
        options: dict[str, Any] = {"d": d, "dt_limit": dt_limit, "backend": cache.backend}

        def plain(states: jax.Array, step: RecurrentStep) -> Output:
            return selective_scan(x, states, dt, a, b, c, *step, **options)

        def in_ring(states: jax.Array, ring: Column, of_step: dict[str, Any]) -> OutputOverRing:
            return ring_scan(x, states, dt, a, b, c, ScanRing(*ring), **of_step, **options)

        return _updated(states, step, x.shape[0], sizes, in_ring, plain)

    sizes = cache.ring_sizes(layer_name)
    groups = 1 if b.ndim == 3 and b.shape[1] > 1 else None
    head_dims, inputs = (1, 1, 0, groups, groups, 0), (x, dt, a, b, c, d)
    return cache.update_states(layer_name, scan, inputs, head_dims, arrays=_arrays_from(array, sizes))


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
    """The gated delta rule of queries and keys of length 1; key heads are split with their value heads.

    Pages may have several states for a value head, each of as many of its numbers, and be wider than keys and values
    are (`layouts.recurrent_layout`): zeros behind both stay zeros.
    """

    def rule(states: Column, step: AnyStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        q, k, v, g, beta = inputs
        heads, key_dim, value_dim = states[0].shape[1:]
        options: dict[str, Any] = {"scale": q.shape[2] ** -0.5, "use_qk_l2norm": True, "backend": cache.backend}
        parts = v.reshape(v.shape[0], heads, -1)
        q, k, v = _widened(q, key_dim), _widened(k, key_dim), _widened(parts, value_dim)
        g, beta = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (g, beta))
        g = _widened(g, key_dim) if g.ndim == 3 else g

        def plain(states: jax.Array, step: RecurrentStep) -> Output:
            return gated_delta_rule(q, k, v, g, beta, states, *step, **options)

        def in_ring(states: jax.Array, ring: Column, of_step: dict[str, Any]) -> OutputOverRing:
            return ring_delta_rule(q, k, v, g, beta, states, DeltaRing(*ring), **of_step, **options)

        out, after = _updated(states, step, v.shape[0], sizes, in_ring, plain)
        return out[..., : parts.shape[2]].reshape(inputs[2].shape), after

    sizes = cache.ring_sizes(layer_name)
    return cache.update_states(layer_name, rule, (q, k, v, g, beta), (1,) * 5, arrays=_arrays_from(array, sizes))


def _widened(x: jax.Array, count: int) -> jax.Array:
    """x [T, heads, n] with zeros behind up to `count` numbers."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, count - x.shape[2])])


def _arrays_from(array: int, sizes: RingSizes | None) -> tuple[int, ...]:
    """The array of states, and behind it those of its ring and of its base."""
    return (array,) if sizes is None else tuple(range(array, array + 5))


def _updated(
    arrays: Column, step: AnyStep, num_tokens: int, sizes: RingSizes | None, ring_op: RingOp, plain_op: PlainOp
) -> tuple[jax.Array, Column]:
    """What a step of so many tokens gives over states, and over states with rings."""
    if isinstance(step, StepOverRings):
        assert sizes is not None  # of the same layer
        return update_in_ring(arrays, step, num_tokens, sizes, ring_op, plain_op)
    result = plain_op(arrays[0], step)
    return result.out, (result.states,)


__all__ = ["apply_delta_rule", "convolve_states", "scan_states"]
