"""Picks for each query token the compressed entries that it will attend to.

Flow:    index queries and weights, pages of index keys -> [indexer_topk] -> int32[T, K] -> sparse_mla_attention
Source:  the lightning indexer of DeepSeek V3.2 and V4: score of an entry = sum over heads of weight * relu(q . k)

Axis names: as ragged_paged_attention; Hi index heads (64 in DeepSeek V4), Di their dimension (128), K entries picked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.indexer_topk import reference, validate, xla_topk
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import name_in_slabs, page_arrays
from pallas_kernels.xla.walks import path_over

if TYPE_CHECKING:
    from pallas_kernels.indexer_topk import kernel_tpu, triton_scores
    from pallas_kernels.tpu import memory
else:
    kernel_tpu = lazy("pallas_kernels.indexer_topk.kernel_tpu")
    triton_scores = lazy("pallas_kernels.indexer_topk.triton_scores")
    memory = lazy("pallas_kernels.tpu.memory")


@by_default_rules
def indexer_topk(
    q: jax.Array,  # [T, Hi, Di]
    weights: jax.Array,  # [T, Hi]
    pages: tuple[jax.Array, ...],  # index keys, as pallas_kernels.layouts: (latent,)
    block_tables: jax.Array,  # int32[S, P] padded with 0
    seq_lens: jax.Array,  # int32[S] tokens up to the last query of each sequence, 0 for empty rows
    query_start_loc: jax.Array,  # int32[S + 1] first query token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    *,
    topk: int,
    tokens_per_state: int,  # tokens of an entry
    entries: EntryFormat = Plain(),  # noqa: B008
    page_size: int | None = None,  # entries of a page; None: as many as there is room for, packing included
    backend: str = "auto",
) -> jax.Array:
    """int32[T, topk]: per token the entries of the highest scores, highest first, -1 after the last.

    A query at `pos` picks among the entries `e < (pos + 1) // tokens_per_state`; where there are no more than `topk` it
    picks all. Equal scores: the smaller entry first. With few heads that decides often, since an entry that all heads
    find negative scores 0; `torch.topk`, which the source calls, promises no order there. Scores are float32, any
    common positive factor of them may be left out, and they must be finite. Padding picks none.

    Raises:
        ValueError: shapes, dtypes, options or (outside `jit`) values do not fit.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    step = (block_tables, seq_lens, query_start_loc, distribution)
    latent = validate.check(q, weights, pages, step, topk, tokens_per_state, entries, page_size)
    options: dict[str, Any] = {"topk": int(topk), "tokens_per_state": int(tokens_per_state), "entries": entries}
    options["page_size"] = latent.page_size
    path = path_over(block_tables, page_arrays(pages), "index keys")
    reasons = {
        "tpu": lambda: kernel_tpu.reason_not_supported(q, page_arrays(pages), block_tables, **options),
        "triton": lambda: triton_scores.reason_not_supported(entries, latent.array),
    }
    chosen = resolve_backend(name_in_slabs(validate.OP, pages), backend, reasons, path)
    arguments = (q, weights, page_arrays(pages), *step)
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.indexer_topk, *arguments, **options)
    if chosen == "tpu":
        return kernel_tpu.indexer_topk(*arguments, **options)
    if chosen == "reference":
        return reference.indexer_topk(*arguments, **options)
    return xla_topk.indexer_topk(*arguments, **options, by_triton=chosen == "triton")
