"""selective_scan for TPU: one launch for decode tokens, one for the sequences that bring several.

Flow:    api -> [selective_scan] -> tpu_decode, then tpu_mamba1 or tpu_ssd (Mamba 2) -> (out, states)

XLA makes the time steps and adds `d * x`: elementwise work on what it reads or writes anyway. Sequences that keep
states for drafts have few tokens and go by XLA.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.page_ops.tpu_states import array_of, by_dma
from pallas_kernels.slab_pages import is_in_slabs
from pallas_kernels.ssm_update import tpu_decode, tpu_mamba1, tpu_ssd
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.reference import add_skip, scan_drafts, time_steps
from pallas_kernels.state_step import StateStep, StepArrays
from pallas_kernels.tpu.mosaic import LANES, SUBLANES
from pallas_kernels.tpu.segments import decode_pages, num_decode_tokens, plan_segments
from pallas_kernels.tpu.slab_refs import reason_of_slabs

_MOST_VMEM_BYTES = 40 << 20


def reason_not_supported(x: jax.Array, states: jax.Array, b: jax.Array) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    reason = reason_of_slabs(states)
    if reason is not None:
        return reason
    if jnp.float16 in (x.dtype, states.dtype, b.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    num_bytes = _vmem_bytes(x, states)
    if num_bytes > _MOST_VMEM_BYTES:
        return (
            f"the TPU kernels keep a sequence's whole state in VMEM, with inputs {_MOST_VMEM_BYTES >> 20} MiB, got "
            f"{num_bytes >> 20} MiB; split the heads over more chips"
        )
    if x.ndim == 2:
        channels, state_dim = states.shape[1:]
        if channels % LANES or state_dim % SUBLANES:
            return (
                f"TPU kernels take channels in multiples of {LANES} and states of Mamba 1 in multiples of {SUBLANES}, "
                f"got {channels} and {state_dim}"
            )
        return None
    head_dim, state_dim = states.shape[2:]
    if state_dim % LANES:
        return f"TPU kernels take Mamba 2 states in multiples of {LANES}, got {state_dim}"
    if head_dim % SUBLANES or (LANES % head_dim and head_dim % LANES):
        return f"TPU kernels take heads of 8, 16, 32, 64 or multiples of {LANES}, got {head_dim}"
    heads, tile = x.shape[1] // b.shape[1], tpu_ssd.heads_per_tile(head_dim)
    if heads % tile:
        return f"TPU kernels take groups of multiples of {tile} heads of {head_dim}, got {heads}"
    return None


def _vmem_bytes(x: jax.Array, states: jax.Array) -> int:
    """About what a chunk's inputs and outputs take in VMEM, two buffers each, and three or four copies of a state."""
    state_bytes = 4 * math.prod(states.shape[1:])
    if x.ndim == 2:
        per_channel = 4 * x.dtype.itemsize + 8 + 12  # time steps, and what is spread
        return tpu_mamba1.chunk_tokens(x.shape[1]) * x.shape[1] * per_channel + 5 * state_bytes
    return tpu_ssd.CHUNK * math.prod(x.shape[1:]) * 4 * x.dtype.itemsize + 3 * state_bytes


@functools.partial(jax.jit, static_argnames="dt_limit")
def selective_scan(
    arguments: Scan, states: jax.Array, arrays: StepArrays, *, dt_limit: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, dt, a, b, c, d, dt_bias = arguments
    step = StateStep.of(x.shape[0], arrays)
    inputs = (x, time_steps(dt, dt_bias, dt_limit), a.astype(jnp.float32), b, c)
    out, states = _scan(*inputs, states, step, arrays.distribution)
    if step.write.shape[1] > 1:
        of_drafts, drafts, states = scan_drafts(*inputs, by_dma(states), step)
        states = array_of(states)
        out = jnp.where(_of_tokens(of_drafts, x), drafts, out)
    return add_skip(out, x, d, step), states


def _scan(
    x: jax.Array,
    dt: jax.Array,  # time steps
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    states: jax.Array,
    step: StateStep,
    distribution: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32 as x, right for sequences that keep their last state only; states)."""
    num_tokens, is_mamba1 = x.shape[0], x.ndim == 2
    swaps = is_mamba1 and not is_in_slabs(states)
    if swaps:  # as XLA lays states of few numbers out, so that this moves nothing
        states = states.swapaxes(1, 2)
    a = a.T if is_mamba1 else a
    num_decode = num_decode_tokens(step, distribution)
    out, states = _decode(x, states, dt, a, b, c, step, num_decode)
    if num_tokens > 1:
        chunk = tpu_mamba1.chunk_tokens(x.shape[1]) if is_mamba1 else tpu_ssd.CHUNK
        peeks = not is_mamba1 and step.checkpoints is not None
        segments = plan_segments(step.without_drafts(), distribution, num_tokens, chunk, peeks)
        if is_mamba1:
            scanned, states = tpu_mamba1.scan(x, states, dt, a, b, c, segments)
        else:
            scanned, states = tpu_ssd.ssd(x, states, dt, a, b, c, segments, peeks=peeks)
        out = jnp.pad(out, [(0, num_tokens - out.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        out = jnp.where(_of_tokens(jnp.arange(num_tokens) < num_decode, x), out, scanned.astype(jnp.float32))
    return out, states.swapaxes(1, 2) if swaps else states


def _decode(
    x: jax.Array,
    states: jax.Array,  # as the kernels take them, as all below
    dt: jax.Array,  # time steps
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    step: StateStep,
    num_decode: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32 of the first tokens, as many as there are sequences, right for decode tokens; states)."""
    num_tokens = x.shape[0]
    most = min(num_tokens, step.q_lens.shape[0])
    rows = most + -most % tpu_decode.TOKENS
    pages = (*decode_pages(step, num_decode, rows), num_decode)
    x, dt, b, c = (jnp.pad(y[:rows], [(0, max(0, rows - num_tokens)), *[(0, 0)] * (y.ndim - 1)]) for y in (x, dt, b, c))
    inflow = x.astype(jnp.float32) * dt.reshape(*dt.shape, *[1] * (x.ndim - 2))
    if x.ndim == 2:
        out, states = tpu_decode.mamba1(states, inflow, dt, a, b, c, *pages)
    else:
        out, states = tpu_decode.mamba2(states, inflow, jnp.exp(dt * a), b, c, *pages)
    return out[:most], states


def _of_tokens(flags: jax.Array, x: jax.Array) -> jax.Array:
    """bool[T] to go with x [T, ...]."""
    return flags.reshape(-1, *[1] * (x.ndim - 1))
