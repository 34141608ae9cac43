"""selective_scan for TPU: one launch for decode tokens, one for the sequences that bring several.

Flow:    api -> [selective_scan] -> tpu_decode, then tpu_ssd (Mamba 2) -> (out, states)

XLA makes the time steps and adds `d * x`: elementwise work on what it reads or writes anyway.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import LANES, SUBLANES
from pallas_kernels.ssm_update import tpu_decode, tpu_ssd
from pallas_kernels.ssm_update.reference import StateStep, time_steps
from pallas_kernels.ssm_update.tpu_plan import decode_pages, num_decode_tokens, plan_segments


def reason_not_supported(x: jax.Array, states: jax.Array, b: jax.Array) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    if jnp.float16 in (x.dtype, states.dtype, b.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    if x.ndim == 2:
        return "there is no tpu kernel of Mamba 1"
    head_dim, state_dim = states.shape[2:]
    if state_dim % LANES:
        return f"TPU kernels take Mamba 2 states in multiples of {LANES}, got {state_dim}"
    if head_dim % SUBLANES or (LANES % head_dim and head_dim % LANES):
        return f"TPU kernels take heads of 8, 16, 32, 64 or multiples of {LANES}, got {head_dim}"
    heads, tile = x.shape[1] // b.shape[1], tpu_ssd.heads_per_tile(head_dim)
    if heads % tile:
        return f"TPU kernels take groups of multiples of {tile} heads of {head_dim}, got {heads}"
    return None


@functools.partial(jax.jit, static_argnames="dt_limit")
def selective_scan(
    x: jax.Array,  # [T, H, P]
    states: jax.Array,  # [pages, H, P, N]
    dt: jax.Array,  # [T, H]
    a: jax.Array,  # [H]
    b: jax.Array,  # [T, G, N]
    c: jax.Array,
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    state_read: jax.Array,  # int32[S]
    state_write: jax.Array,  # int32[S]
    has_initial_state: jax.Array,  # bool[S]
    *,
    d: jax.Array | None,
    dt_bias: jax.Array | None,
    dt_limit: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    num_tokens, num_pages = x.shape[0], states.shape[0]
    pages = (state_read, state_write, has_initial_state)
    step = StateStep.of(num_tokens, num_pages, query_start_loc, distribution, *pages)
    dt, a = time_steps(dt, dt_bias, dt_limit), a.astype(jnp.float32)
    num_decode = num_decode_tokens(step, distribution)
    rows = min(num_tokens, step.q_lens.shape[0])
    rows += -rows % tpu_decode.TOKENS

    def first(y: jax.Array) -> jax.Array:
        return jnp.pad(y[:rows], [(0, max(0, rows - num_tokens)), *[(0, 0)] * (y.ndim - 1)])

    inputs = first(x).astype(jnp.float32) * first(dt)[..., None]
    read, write = decode_pages(step, num_decode, rows, num_pages)
    decoded, states = tpu_decode.mamba2(
        states, inputs, jnp.exp(first(dt) * a), first(b), first(c), read, write, num_decode
    )
    out = decoded[:num_tokens]
    if num_tokens > 1:
        segments = plan_segments(step, distribution, num_tokens, num_pages, tpu_ssd.CHUNK)
        scanned, states = tpu_ssd.ssd(x, states, dt, a, b, c, segments)
        is_decode = (jnp.arange(num_tokens) < num_decode)[:, None, None]
        out = jnp.pad(out, [(0, num_tokens - out.shape[0]), (0, 0), (0, 0)])
        out = jnp.where(is_decode, out, scanned.astype(jnp.float32))
    if d is not None:
        out = out + d.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
    return jnp.where((step.place >= 0)[:, None, None], out, 0.0).astype(x.dtype), states
