"""gated_delta_rule for TPU: a kernel for decode tokens; sequences of several tokens in chunks, by XLA.

Flow:    api -> [gated_delta_rule] -> tpu_decode, then reference.scan -> (out, states)

Both leave the states where they are. XLA norms q and k and makes decays: elementwise work on little.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import tpu_decode
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options, StepArrays
from pallas_kernels.gated_delta_rule.reference import CHUNK_TOKENS, TokenStates, prepared, scan
from pallas_kernels.mosaic import LANES


def reason_not_supported(v: jax.Array, states: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if jnp.float16 in (v.dtype, states.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    key_dim, value_dim = states.shape[2:]
    if key_dim % LANES or value_dim % LANES:
        return f"the TPU kernel takes keys and values in multiples of {LANES}, got {key_dim} and {value_dim}"
    return None


@functools.partial(jax.jit, static_argnames="options")
def gated_delta_rule(
    inputs: Inputs, states: jax.Array, arrays: StepArrays, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `DeltaOutput`."""
    num_tokens, num_pages = inputs.v.shape[0], states.shape[0]
    tokens = TokenStates.of(num_tokens, num_pages, arrays)
    num_decode = arrays.query_start_loc[arrays.distribution[0]]
    of_decode = jnp.arange(num_tokens) < num_decode
    most = min(num_tokens, arrays.state_read.shape[0])
    rows = most + -most % tpu_decode.TOKENS
    first = Inputs(*(_first(x, rows) for x in prepared(inputs, options)))
    read = _first(jnp.where(of_decode, tokens.read, 0), rows)
    write = _first(jnp.where(of_decode & (tokens.write < num_pages), tokens.write, 0), rows)
    decoded, states = tpu_decode.decode(first, states, read, write, num_decode)
    out = jnp.where(of_decode[:, None, None], _first(decoded, num_tokens), 0)
    if num_tokens > 1:
        others = tokens._replace(place=jnp.where(of_decode, -1, tokens.place))
        scanned, states = scan(inputs, states, others, options, CHUNK_TOKENS)
        out = jnp.where(of_decode[:, None, None], out, scanned)
    return out.astype(inputs.v.dtype), states


def _first(x: jax.Array, count: int) -> jax.Array:
    """The first `count` of x along axis 0, zero where there are not so many."""
    x = x[:count]
    return jnp.pad(x, [(0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
