"""gated_delta_rule for TPU: one launch for decode tokens, one for the sequences that bring several.

Flow:    api -> [gated_delta_rule] -> tpu_decode, then tpu_chunks -> (out, states)

All leave the states where they are. XLA norms q and k and makes decays: elementwise work on little. Sequences that keep
states for drafts have few tokens and go token by token, by XLA.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import tpu_chunks, tpu_decode
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.reference import TokenStates, prepared, scan
from pallas_kernels.page_ops.tpu_states import array_of, by_dma
from pallas_kernels.state_step import StateStep, StepArrays
from pallas_kernels.tpu.mosaic import LANES
from pallas_kernels.tpu.segments import num_decode_tokens, plan_segments
from pallas_kernels.tpu.slab_refs import reason_of_slabs

_MOST_VMEM_BYTES = 40 << 20


def reason_not_supported(v: jax.Array, k: jax.Array, g: jax.Array, states: jax.Array) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    if jnp.float16 in (v.dtype, states.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    reason = reason_of_slabs(states)
    if reason is not None:
        return reason
    key_dim, value_dim = states.shape[2:]
    if key_dim % LANES or value_dim % LANES:
        return f"the TPU kernels take keys and values in multiples of {LANES}, got {key_dim} and {value_dim}"
    of_token = 2 * math.prod(k.shape[1:]) + 2 * math.prod(v.shape[1:]) + math.prod(g.shape[1:])
    num_bytes = 8 * tpu_chunks.CHUNK * of_token + 12 * math.prod(states.shape[1:])
    if num_bytes > _MOST_VMEM_BYTES:
        return (
            f"the TPU kernels keep a sequence's whole state in VMEM, with inputs {_MOST_VMEM_BYTES >> 20} MiB, got "
            f"{num_bytes >> 20} MiB; split the heads over more chips"
        )
    return None


@functools.partial(jax.jit, static_argnames="options")
def gated_delta_rule(
    inputs: Inputs, states: jax.Array, arrays: StepArrays, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `DeltaOutput`."""
    num_tokens = inputs.v.shape[0]
    step = StateStep.of(num_tokens, arrays)
    tokens = TokenStates.of(step)
    num_decode = num_decode_tokens(step, arrays.distribution)
    of_decode = jnp.arange(num_tokens) < num_decode
    ready = prepared(inputs, options)
    out, states = _decode(ready, states, tokens, num_decode, arrays.state_read.shape[0])
    if num_tokens > 1:
        peeks = step.checkpoints is not None
        segments = plan_segments(step.without_drafts(), arrays.distribution, num_tokens, tpu_chunks.CHUNK, peeks)
        chunked, states = tpu_chunks.delta_chunks(ready, states, segments, peeks=peeks)
        out = _where(of_decode, out, chunked)
    if num_tokens > 1 and arrays.state_write.shape[1] > 1:
        of_drafts = (step.num_kept > 1)[step.seq] & ~of_decode
        drafts = tokens._replace(place=jnp.where(of_drafts, tokens.place, -1))
        scanned, states = scan(inputs, by_dma(states), drafts, options, 1)
        states = array_of(states)
        out = _where(of_drafts, scanned, out)
    return _where(tokens.place >= 0, out, jnp.zeros_like(out)).astype(inputs.v.dtype), states


def _decode(
    inputs: Inputs, states: jax.Array, tokens: TokenStates, num_decode: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32[T, H, V], right for the first `num_decode` tokens; states)."""
    num_tokens = inputs.v.shape[0]
    of_decode = jnp.arange(num_tokens) < num_decode
    most = min(num_tokens, num_rows)
    rows = most + -most % tpu_decode.TOKENS
    read = _first(jnp.where(of_decode, tokens.read, 0), rows)
    write = _first(jnp.where(of_decode, tokens.write, 0), rows)
    out, states = tpu_decode.decode(Inputs(*(_first(x, rows) for x in inputs)), states, read, write, num_decode)
    return _first(out, num_tokens), states


def _first(x: jax.Array, count: int) -> jax.Array:
    """The first `count` of x along axis 0, zero where there are not so many."""
    x = x[:count]
    return jnp.pad(x, [(0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def _where(tokens: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """x [T, H, V] for these tokens, y for the others."""
    return jnp.where(tokens[:, None, None], x, y)
