"""Attention over latents that an indexer picks: DeepSeek V4's beside a sliding window, DeepSeek V3.2's alone.

Flow:    queries, window pages, compressed pages, indices -> [sparse_mla_attention] -> AttentionOutput
         SparseSchedule of a step -> [plan_work] -> work, for all layers of one kind
Source:  DeepSeek V4 (deepseek-ai/DeepSeek-V4-Flash): one latent per token is key and value of all heads; layers of
         ratio 4 see the compressed entries that their indexer picks, of ratio 128 all, of ratio 0 none; with sinks.
         DeepSeek V3.2 (deepseek-ai/DeepSeek-V3.2-Exp): a query sees the tokens that its layer's indexer picks

Axis names: as ragged_paged_attention; D latent dimension (512), Pc columns of the compressed cache's table, K indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_checks
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.backends import Reason, resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_write import latent_write
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import name_in_slabs, page_arrays
from pallas_kernels.sparse_mla_attention import reference, validate, xla_attention
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule, plan

if TYPE_CHECKING:
    from pallas_kernels.sparse_mla_attention import kernel_gpu, kernel_tpu
    from pallas_kernels.tpu import memory
else:
    kernel_gpu = lazy("pallas_kernels.sparse_mla_attention.kernel_gpu")
    kernel_tpu = lazy("pallas_kernels.sparse_mla_attention.kernel_tpu")
    memory = lazy("pallas_kernels.tpu.memory")


@by_default_rules
def plan_work(
    q: Any,  # [T, Hq, D]; of it and of the pages shapes and dtypes alone: arrays or ShapeDtypeStructs
    pages: tuple[Any, ...],
    schedule: SparseSchedule,
    *,
    compressed_pages: tuple[Any, ...] | None = None,
    compressed_tables: jax.Array | None = None,  # int32[S, Pc]
    tokens_per_state: int | None = None,
    num_picks: int | None = None,  # entries that a layer's indices name for each token; None: all are seen
    entries: EntryFormat = Plain(),  # noqa: B008
    compressed_page_size: int | None = None,
    backend: str = "auto",
) -> Any:
    """What the backend computes from a step's schedule alone: `work` of every layer of one kind.

    A kind is what all arguments but the pages' contents say: queries, ratio, how many entries are picked. None where
    the backend has nothing to plan: all but the GPU's kernel. To be made once a step, outside of loops over layers.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        NotImplementedError: as the op.
    """
    sliding_window = np.shape(schedule.window_slots)[-1]
    validate.check_schedule(q, schedule, sliding_window)
    num_picks = None if compressed_pages is None else num_picks
    picks = None if num_picks is None else jax.ShapeDtypeStruct((q.shape[0], num_picks), jnp.int32)
    compressed = validate.check_compressed(
        q, compressed_pages, compressed_tables, tokens_per_state, picks, entries, compressed_page_size
    )
    options: dict[str, Any] = {
        "tokens_per_state": tokens_per_state or 1,
        "entry_page_size": 1 if compressed is None else compressed.page_size,
    }
    reasons: dict[str, Reason] = {
        "tpu": None,
        "gpu": lambda: _reason_of_gpu(backend, sliding_window, q, pages, compressed_pages, entries),
    }
    xla = xla_attention.path_over(
        q, page_arrays(pages), sliding_window, options["entry_page_size"], compressed_tables, num_picks
    )
    if resolve_backend(name_in_slabs(validate.OP, pages), backend, reasons, xla) != "gpu":
        return None
    return kernel_gpu.plan(schedule, q, compressed_tables, num_picks=num_picks, **options)


@by_default_rules
def sparse_mla_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],  # window cache, as pallas_kernels.layouts: (latent,)
    block_tables: jax.Array,  # int32[S, P] of the window cache, padded with 0
    seq_lens: jax.Array,  # int32[S] tokens up to the last query of each sequence, 0 for empty rows
    query_start_loc: jax.Array,  # int32[S + 1] first query token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    *,
    compressed_pages: tuple[jax.Array, ...] | None = None,  # (latent,); None: the layer has its window only
    compressed_tables: jax.Array | None = None,  # int32[S, Pc]
    tokens_per_state: int | None = None,  # tokens of a compressed entry
    topk_indices: jax.Array | None = None,  # int32[T, K] entries of the token's sequence, -1: none; None: all
    new_kv: jax.Array | None = None,  # [T, D]: written to the window cache before attention
    slot_mapping: jax.Array | None = None,  # int32[T] slots of new_kv, -1: skip
    sm_scale: float,
    sliding_window: int,  # 0: a token sees the entries alone that its indices name
    sinks: jax.Array | None = None,  # float32[Hq] natural-log logits, -inf: none
    schedule: SparseSchedule | None = None,  # what `plan` returned for this step and window cache
    work: Any = None,  # what `plan_work` returned for that schedule and this kind of layer, or None
    return_lse: bool = False,
    entries: EntryFormat = Plain(),  # noqa: B008  of both caches
    page_size: int | None = None,  # states of a page; None: as many as there is room for, packing included
    compressed_page_size: int | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention of all query tokens over their window and their compressed entries; `out` is [T, Hq, D].

    Query i of sequence s is at `pos = seq_lens[s] - q_len[s] + i`. It sees the latents of tokens
    `max(0, pos - sliding_window + 1) ... pos` and those entries e, named by `topk_indices` if given, with
    `0 <= e < (pos + 1) // tokens_per_state`; indices outside count as none, and no entry is named twice. New entries
    of the step must be in the compressed pages already (`latent_write`). A sink is one more logit of the one softmax.

    Slots that a query does not see are never read, so they may hold anything. Padding gives out 0 and LSE -inf, as does
    a token that sees nothing.

    Raises:
        ValueError: shapes, dtypes, options or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    attention_checks.check_scalars(validate.OP, sm_scale, None)
    latent = validate.check_window(q, pages, sliding_window, entries, page_size)
    pages = page_arrays(pages)
    compressed = validate.check_compressed(
        q, compressed_pages, compressed_tables, tokens_per_state, topk_indices, entries, compressed_page_size
    )
    validate.check_sees(sliding_window, topk_indices)
    validate.check_new_kv(q, new_kv, slot_mapping, latent)
    step = (block_tables, seq_lens, query_start_loc, distribution)
    validate.check_step(q, latent, compressed, step, compressed_tables, tokens_per_state)
    validate.check_sinks(q, sinks)
    validate.check_schedule(q, schedule, sliding_window)
    if schedule is None:
        sizes = {"num_tokens": q.shape[0], "sliding_window": int(sliding_window), "page_size": latent.page_size}
        schedule = plan(*step, **sizes)
    options: dict[str, Any] = {
        "tokens_per_state": tokens_per_state or 1,
        "entries": entries,
        "page_size": latent.page_size,
        "entry_page_size": 1 if compressed is None else compressed.page_size,
    }
    arrays = (compressed_pages, compressed_tables, topk_indices)
    reasons: dict[str, Reason] = {
        "tpu": lambda: kernel_tpu.reason_not_supported(q, pages, schedule, *arrays, **options),
        "gpu": lambda: _reason_of_gpu(backend, sliding_window, q, pages, compressed_pages, entries),
    }
    num_picks = None if topk_indices is None else topk_indices.shape[1]
    named = (sliding_window, options["entry_page_size"], compressed_tables, num_picks)
    xla = xla_attention.path_over(q, pages, *named)
    chosen = resolve_backend(name_in_slabs(validate.OP, pages), backend, reasons, xla)
    entry_pages = None if compressed is None else (compressed.array,)
    arguments = (q, pages, schedule, entry_pages, *arrays[1:], sinks)
    of_tpu = options | {
        "sm_scale": float(sm_scale),
        "sliding_window": int(sliding_window),
        "return_lse": return_lse,
    }
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.sparse_mla_attention, *arguments, **of_tpu)
    if new_kv is not None and slot_mapping is not None:
        pages = latent_write(new_kv, pages, slot_mapping, entries=entries, page_size=latent.page_size, backend=backend)
        arguments = (q, pages, *arguments[2:])
    if chosen == "tpu":
        out, lse = kernel_tpu.sparse_mla_attention(*arguments, **of_tpu)
    elif chosen == "gpu":
        out, lse = kernel_gpu.sparse_mla_attention(*arguments, sm_scale=float(sm_scale), **options, work=work)
    else:
        plain = xla_attention if chosen == "xla" else reference
        out, lse = plain.sparse_mla_attention(*arguments, sm_scale=float(sm_scale), **options)
    return AttentionOutput(out, lse if return_lse else None, pages)


def _reason_of_gpu(backend: str, sliding_window: int, *arguments: Any) -> str | None:
    """What the kernel for Hopper cannot do; nothing is left to it that does not ask for it by name."""
    if backend == "auto":
        return "the gpu kernel gave wrong numbers on an H200, and no card has run it since it was mended"
    if not sliding_window:
        return "GPU kernels take windows of at least one token, got sliding_window=0"
    return kernel_gpu.reason_not_supported(*arguments)
