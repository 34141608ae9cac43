"""Keeps a compressor's states of the last tokens, and pools them into an entry where enough have come.

Flow:    KV and scores of new tokens -> [compressor_update] -> entries -> norm and rotation of the model -> latent_write
Source:  the compressor of DeepSeek V4 (deepseek-ai/DeepSeek-V4-Flash): an entry is a mean of its tokens' KV, weighted
         for each number by a softmax of scores over the tokens; with overlap, over those of the entry before too

A state is `[KV | score]` of one token, float32[2 * coff * D]; coff is 2 with overlap, else 1. With overlap every
token has KV and scores twice: the first D numbers of both for the entry after its own, the last for its own.

Axis names: as ragged_paged_attention; R tokens of an entry, D dimension of an entry, N room for entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from pallas_kernels.backends import XlaPath, resolve_backend
from pallas_kernels.compressor_update import reference, validate
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import name_in_slabs, page_arrays

if TYPE_CHECKING:
    from pallas_kernels.compressor_update import kernel_tpu, triton_pool
    from pallas_kernels.tpu import memory
    from pallas_kernels.triton import call as triton
else:
    kernel_tpu = lazy("pallas_kernels.compressor_update.kernel_tpu")
    triton_pool = lazy("pallas_kernels.compressor_update.triton_pool")
    memory = lazy("pallas_kernels.tpu.memory")
    triton = lazy("pallas_kernels.triton.call")


class CompressorOutput(NamedTuple):
    """Entries that the new tokens complete, sequence by sequence, as `CompressedStates.slot_mapping` has them."""

    entries: jax.Array  # float32[N, D], 0 after the last
    positions: jax.Array  # int32[N] of the first token of each entry, -1 after the last
    pages: tuple[jax.Array, ...]


def max_new_entries(num_tokens: int, num_seqs: int, tokens_per_state: int) -> int:
    """N, the most entries that `num_tokens` new tokens of `num_seqs` sequences complete."""
    return min(num_tokens, num_tokens // tokens_per_state + num_seqs)


@by_default_rules
def compressor_update(
    kv: jax.Array,  # [T, coff * D]
    scores: jax.Array,  # [T, coff * D]
    pages: tuple[jax.Array, ...],  # float32 states, as pallas_kernels.layouts: (latent,) of 2 * coff * D numbers
    block_tables: jax.Array,  # int32[S, P] of the states, padded with 0
    seq_lens: jax.Array,  # int32[S] tokens up to the last new one of each sequence, 0 for empty rows
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    slot_mapping: jax.Array,  # int32[T] slots of the new states, -1: skip
    *,
    position_bias: jax.Array,  # float32[R, coff * D] added to the scores of an entry's tokens, in their order
    overlap: bool,
    page_size: int | None = None,  # states of a page; None: as many as there is room for, packing included
    backend: str = "auto",
) -> CompressorOutput:
    """Writes the new states, then pools the entries `e` with `(e + 1) * R` in `(computed, seq_len]` of each sequence.

    An entry reads the states of its R tokens, and with overlap of the R before, through the block table: the pages of
    the last `coff * R` tokens must be there. Entry 0 has none before it. Entries are not normed, rotated or written.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    step = (block_tables, seq_lens, query_start_loc, distribution)
    page_size = validate.check(kv, scores, pages, step, slot_mapping, position_bias, overlap, page_size)
    room = max_new_entries(kv.shape[0], block_tables.shape[0], position_bias.shape[0])
    options: dict[str, Any] = {"overlap": overlap, "page_size": page_size, "room": room}
    reasons = {
        "tpu": lambda: kernel_tpu.reason_not_supported(kv, pages, position_bias, **options),
        "triton": lambda: triton.reason_without_triton(),
    }
    num_bytes = room * reference.entry_bytes(position_bias, overlap)
    path = XlaPath(3, num_bytes, "the states that its entries pool", triton_passes=1)
    chosen = resolve_backend(name_in_slabs(validate.OP, pages), backend, reasons, path)
    arguments = (kv, scores, page_arrays(pages), *step, slot_mapping, position_bias)
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.compressor_update, *arguments, **options)
    if chosen == "tpu":
        return CompressorOutput(*kernel_tpu.compressor_update(*arguments, **options))
    if chosen == "triton":
        return CompressorOutput(*triton_pool.compressor_update(*arguments, **options))
    if chosen == "xla":
        options["at_once"] = reference.entries_on_gpu(position_bias, overlap)
    return CompressorOutput(*reference.compressor_update(*arguments, **options))
