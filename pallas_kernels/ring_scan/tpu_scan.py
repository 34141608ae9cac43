"""ring_scan for TPU: a kernel for what base states and rings give, XLA for what the new tokens give each other.

Flow:    api -> [ring_scan] -> tpu_ring -> sums over base and held tokens, pages written; new tokens -> (out, pages)

A new token sees the held ones through one decay a head more, that of the new tokens up to it, which XLA multiplies on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import slot_rows
from pallas_kernels.ring_scan import tpu_ring
from pallas_kernels.ring_scan.arguments import Options, Scan
from pallas_kernels.ring_scan.reference import Pages, Tokens, with_skip
from pallas_kernels.ring_scan.slots import to_slots
from pallas_kernels.ring_step import RingArrays, RingStep
from pallas_kernels.ssm_update.running_sums import RunningSums
from pallas_kernels.tpu.mosaic import LANES, SUBLANES
from pallas_kernels.tpu.slab_refs import reason_of_slabs


def reason_not_supported(inputs: Scan, pages: Sequence[jax.Array], max_new_tokens: int) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    x, b, (states, *ring) = inputs.x, inputs.b, pages
    reason = next((reason for reason in map(reason_of_slabs, pages) if reason is not None), None)
    if reason is not None:
        return reason
    if jnp.float16 in (x.dtype, states.dtype, b.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    (_, heads, head_dim, state_dim), groups, slots = states.shape, b.shape[1], ring[0].shape[1]
    counts = (heads * head_dim, heads, groups * state_dim)
    for name, array, count in zip(("xs", "dts", "bs"), ring, counts, strict=True):
        wanted = slot_rows(count, str(array.dtype))
        if array.shape[2:] != wanted:
            return f"TPU kernels take ring.{name} with slots {wanted}, see ring_page_shapes, got {array.shape[2:]}"
    if slots % SUBLANES or slots * max_new_tokens > LANES:
        return (
            f"the TPU kernel takes rings of multiples of {SUBLANES} slots, and up to {LANES} pairs of a slot and a new "
            f"token, got {slots} slots and max_new_tokens {max_new_tokens}"
        )
    if state_dim % LANES or head_dim % SUBLANES or LANES % head_dim:
        return (
            f"the TPU kernel takes states in multiples of {LANES} and heads of 8, 16, 32, 64 or {LANES}, got "
            f"{state_dim} and {head_dim}"
        )
    if (heads // groups * head_dim) % LANES:
        return (
            f"the TPU kernel takes groups of whole rows of {LANES} numbers, got {heads // groups} heads of {head_dim}"
        )
    if tpu_ring.tile_of(heads, groups, head_dim, head_dim * state_dim * states.dtype.itemsize) is None:
        return f"no tile of {heads} heads of {head_dim} x {state_dim} fits VMEM; split the heads over more chips"
    return None


@functools.partial(jax.jit, static_argnames="options")
def ring_scan(inputs: Scan, pages: Pages, arrays: RingArrays, *, options: Options) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingScanOutput`."""
    (num_tokens, _, head_dim), most = inputs.x.shape, options.max_new_tokens
    step = RingStep.of(num_tokens, arrays, most)
    token = step.starts[:, None] + jnp.arange(most)
    token = jnp.where(jnp.arange(most) < step.num_new[:, None], token, num_tokens)

    def of_sequences(x: jax.Array) -> jax.Array:
        return x.at[token].get(mode="fill", fill_value=0)

    new = Tokens(*map(of_sequences, Tokens.of(inputs, options)))
    a, c = inputs.a.astype(jnp.float32), of_sequences(inputs.c).astype(jnp.float32)
    flat = (y.reshape(-1, *y.shape[2:]) for y in new)
    entries = tpu_ring.Entries(*(to_slots(y, pages[i]) for i, y in enumerate(flat, start=1)))
    held, pages = tpu_ring.launch(pages, step, arrays.distribution[2], a, c, entries, head_dim)
    sums = RunningSums.of(jnp.moveaxis(new.dt * a, 1, 2))  # [S, H, M]
    before = held.kept[:, None, :, None] * held.base + held.ring
    seen = jnp.moveaxis(sums.since_start(), 1, 2)[..., None] * before + _among_new(new, c, sums)
    seen = seen[step.seq, jnp.maximum(step.place, 0)] + with_skip(inputs, jnp.arange(num_tokens))
    is_seen = (step.place >= 0).reshape(-1, 1, 1)
    return jnp.where(is_seen, seen, 0.0).astype(inputs.x.dtype), pages


def _among_new(new: Tokens, c: jax.Array, sums: RunningSums) -> jax.Array:
    """float32[S, M, H, P] what new tokens see of each other and themselves."""
    x, dt, b = (y.astype(jnp.float32) for y in new)
    per_group = x.shape[2] // b.shape[2]
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    scores = jnp.repeat(product("smgk,slgk->sgml", c, b), per_group, axis=1)
    return product("shml,slhp->smhp", sums.decays() * scores * jnp.moveaxis(dt, 1, 2)[:, :, None], x)


__all__ = ["reason_not_supported", "ring_scan"]
