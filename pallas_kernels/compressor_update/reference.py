"""compressor_update in plain jnp: the specification, the CPU path, and with more entries at once what GPUs run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latent_pages import LatentPages, state_slots
from pallas_kernels.schedule import Batch
from pallas_kernels.slab_pages import replaced
from pallas_kernels.token_places import TokenPlaces

_AT_ONCE = 16  # entries
_AT_ONCE_BYTES = 64 << 20  # on GPUs: of the states that entries gather


def entry_bytes(position_bias: jax.Array, overlap: bool) -> int:
    """Bytes of the states that one entry gathers."""
    ratio, width = position_bias.shape
    return 4 * 2 * width * ratio * (1 + overlap)


def entries_on_gpu(position_bias: jax.Array, overlap: bool) -> int:
    """Entries that a GPU pools at a time."""
    return max(_AT_ONCE, _AT_ONCE_BYTES // entry_bytes(position_bias, overlap))


@functools.partial(jax.jit, static_argnames=("overlap", "page_size", "room", "at_once"))
def compressor_update(
    kv: jax.Array,  # [T, coff * D]
    scores: jax.Array,  # [T, coff * D]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    slot_mapping: jax.Array,  # int32[T]
    position_bias: jax.Array,  # float32[R, coff * D]
    *,
    overlap: bool,
    page_size: int,
    room: int,
    at_once: int = _AT_ONCE,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The fields of `CompressorOutput`, N being `room`."""
    ratio, width = position_bias.shape
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    states = biased_states(kv, scores, batch, position_bias)
    array = LatentPages(pages[0], page_size, 2 * width).write(states, slot_mapping, None)
    latent = LatentPages(array, page_size, 2 * width)
    seq, entry = new_entries(batch, ratio, room)

    def pool(seq: jax.Array, entry: jax.Array) -> jax.Array:
        """float32[D], one entry; 0 for entry -1."""
        token = entry * ratio + jnp.arange(-ratio * overlap, ratio, dtype=jnp.int32)
        named = (token >= 0) & (entry >= 0)
        slots = jnp.where(named, state_slots(block_tables, page_size, seq, jnp.maximum(token, 0)), 0)
        kv, scores = jnp.split(latent.at_slots(slots), 2, axis=-1)
        if overlap:
            kv, scores = (jnp.concatenate(_own_halves(x, ratio)) for x in (kv, scores))
        scores = jnp.where(named[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=0)
        return jnp.where(entry >= 0, jnp.sum(weights * kv, axis=0), 0.0)

    entries = lax.map(lambda names: pool(*names), (seq, entry), batch_size=at_once)
    return entries, jnp.where(entry >= 0, entry * ratio, -1), replaced(pages, 0, array)


def biased_states(kv: jax.Array, scores: jax.Array, batch: Batch, position_bias: jax.Array) -> jax.Array:
    """float32[T, 2 * coff * D] states of the new tokens."""
    pos = TokenPlaces.of_batch(batch, kv.shape[0]).pos
    biased = scores.astype(jnp.float32) + position_bias[pos % position_bias.shape[0]]
    return jnp.concatenate([kv.astype(jnp.float32), biased], axis=-1)


def _own_halves(x: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
    """What the tokens of the entry before, and what its own, have for an entry, from [2 * ratio, 2 * D]."""
    before, own = x[:ratio], x[ratio:]
    dim = x.shape[-1] // 2
    return before[:, :dim], own[:, dim:]


def new_entries(batch: Batch, ratio: int, room: int) -> tuple[jax.Array, jax.Array]:
    """(row int32[room], number int32[room]) of the entries that the step completes, row by row; number -1: none."""
    first = (batch.seq_lens - batch.q_lens) // ratio
    ends = jnp.cumsum(batch.seq_lens // ratio - first, dtype=jnp.int32)
    n = jnp.arange(room, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(ends[None] <= n[:, None], axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    number = batch.seq_lens[seq] // ratio - ends[seq] + n
    return seq, jnp.where(n < ends[-1], number, -1)
