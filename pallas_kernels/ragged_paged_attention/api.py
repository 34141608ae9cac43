"""Attention of ragged queries over paged KV: decode, prefill and mixed in one call.

Flow:    q, pages, block tables, lengths -> [ragged_paged_attention] -> AttentionOutput
         lengths of a step -> [plan] -> schedule, for all layers with the same shapes and mask
Source:  ARCHITECTURE.md, "The attention contract"; masks as vLLM's windowed and chunked attention, sinks as GPT-OSS's

Axis names: T query tokens (padded), S sequences (padded), P table columns, Hq and Hkv heads, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pallas_kernels import attention_checks
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.backends import Reason, resolve_backend
from pallas_kernels.checks import page_tokens
from pallas_kernels.decode_step import DecodeStep, is_decode_step
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.key_share import NO_SHARES, KeyShare
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.validate import check as check_write
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import reference, validate, xla_attention
from pallas_kernels.slab_pages import name_in_slabs, page_arrays, replaced
from pallas_kernels.xla.walks import path_over

if TYPE_CHECKING:
    from pallas_kernels.ragged_paged_attention import kernel_gpu, kernel_tpu
    from pallas_kernels.tpu import memory
    from pallas_kernels.triton import walks as triton
else:
    kernel_gpu = lazy("pallas_kernels.ragged_paged_attention.kernel_gpu")
    kernel_tpu = lazy("pallas_kernels.ragged_paged_attention.kernel_tpu")
    memory = lazy("pallas_kernels.tpu.memory")
    triton = lazy("pallas_kernels.triton.walks")


@by_default_rules
def plan(
    q: Any,  # [T, Hq, D]; of it and of the pages shapes and dtypes alone: arrays or ShapeDtypeStructs
    pages: tuple[Any, ...],
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    distribution: Any,
    mask: MaskRule,  # what the layers' options say
    *,
    num_kv_heads: int | None = None,
    sink_tokens: Any = None,  # int32[S] where the mask has them by sequence
    is_decode: bool = False,  # every sequence has at most T / S queries, known when the step is traced
    backend: str = "auto",
) -> Any:
    """What the backend computes from a step's lengths alone: `schedule` of every layer with these shapes and this mask.

    None where the backend has nothing to plan: the TPU kernel and the reference, unless all decode. To be made once a
    step, outside of loops over layers, since XLA hoists nothing out of a scan. A step planned with `is_decode` compiles
    to no prefill. It has as many tokens as sequences, and token i is the query of sequence i. On GPUs it may have up to
    eight tokens a sequence, as steps with drafts do, if these and the heads of a KV head fill at most 64 rows.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or with `is_decode` there are not as many tokens as sequences
            or (outside `jit`) a sequence does not decode.
        NotImplementedError: as the op.
    """
    attention_checks.check_mask(validate.OP, mask)
    attention_checks.check_sink_tokens(validate.OP, mask, sink_tokens, seq_lens.shape[0])
    num_kv_heads = validate.check_heads(q, pages, None, num_kv_heads)
    step = (block_tables, seq_lens, query_start_loc, distribution)
    page_size = page_tokens(pages, num_kv_heads)
    attention_checks.check_batch(validate.OP, q.shape[0], page_size, *step, sees_all=mask.sees_all)
    attention_checks.check_decode(validate.OP, q.shape[0], query_start_loc, distribution, is_decode)
    xla = path_over(block_tables, pages)
    chosen = resolve_backend(name_in_slabs(validate.OP, pages), backend, _reasons(q, pages, mask, num_kv_heads), xla)
    if chosen in ("tpu", "reference") and is_decode and q.shape[0] == seq_lens.shape[0]:
        return DecodeStep(q.shape[0])
    if chosen != "gpu":
        return None
    options: dict[str, Any] = {"mask": mask, "num_kv_heads": num_kv_heads, "is_decode": is_decode}
    options["sink_tokens"] = sink_tokens
    return kernel_gpu.plan(q, pages, *step[1:], **options)


@by_default_rules
def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],  # as pallas_kernels.layouts: (k, v) split, or (kv,) packed
    block_tables: jax.Array,  # int32[S, P] page ids, padded with 0
    seq_lens: jax.Array,  # int32[S] tokens visible to the last query of each sequence, 0 for empty rows
    query_start_loc: jax.Array,  # int32[S + 1] first query token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    *,
    new_kv: tuple[jax.Array, jax.Array] | None = None,  # [T, Hkv, D], [T, Hkv, Dv]: written before attention
    slot_mapping: jax.Array | None = None,  # int32[T] slots of new_kv, -1: skip
    sm_scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    num_sink_tokens: int | jax.Array = 0,  # of all sequences, or int32[S] of each
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # float32[Hq] natural-log logits, -inf: none
    k_scale: jax.Array | None = None,  # float32[] or [Hkv]
    v_scale: jax.Array | None = None,
    schedule: Any = None,  # what `plan` returned for this step, or None
    return_lse: bool = False,
    num_kv_heads: int | None = None,  # None: read off the pages; needed where packing pads the heads
    context_rank: Any = 0,  # int or int32[]: whose tokens the pages hold, of `context_size` ranks that share them
    context_size: int = 1,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention outputs of all query tokens.

    Query i of sequence s is at `pos = seq_lens[s] - q_len[s] + i`. Visible are the keys `k <= upper` with
    `k >= lower` or `k < num_sink_tokens` (its own, of an array), where `upper = pos` if causal, else `seq_lens[s] - 1`,
    and `lower = max(0, pos - window + 1, (pos // chunk) * chunk)`. Accumulation is float32. A sequence has at least as
    many tokens as queries, unless it is not causal and has neither window nor chunk: cross attention, where positions
    mean nothing.

    Pages wholly outside are never read, so their table entries may be 0, and what stands in slots that nobody sees
    (NaN too) changes nothing. Padding (tokens after `query_start_loc[distribution[2]]`, rows after `distribution[2]`)
    gives out 0 and LSE -inf. With `new_kv` every sequence sees the new KV of all others of the step. Inside a jitted
    step that donates the pages they are updated in place; pages that are not donated are copied once per call on CPU.

    Under context parallelism (`key_share`) pages hold the tokens of one rank, and `slot_mapping` names places in them;
    lengths and positions stay those of whole sequences. The result is one part for `merge_states`, computed without
    sinks.

    Raises:
        ValueError: shapes, dtypes, options or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    mask, sink_tokens = mask_of(causal, sliding_window, attention_chunk_size, num_sink_tokens)
    attention_checks.check_mask(validate.OP, mask)
    attention_checks.check_sink_tokens(validate.OP, mask, sink_tokens, seq_lens.shape[0])
    attention_checks.check_scalars(validate.OP, sm_scale, soft_cap)
    validate.check_new_kv(q, new_kv, slot_mapping)
    num_kv_heads = validate.check_heads(q, pages, new_kv, num_kv_heads)
    page_size = page_tokens(pages, num_kv_heads)
    share = KeyShare.of_options(validate.OP, context_rank, context_size, sinks)
    step = (block_tables, seq_lens, query_start_loc, distribution)
    attention_checks.check_batch(validate.OP, q.shape[0], page_size * context_size, *step, sees_all=mask.sees_all)
    validate.check_per_head(q.shape[1], num_kv_heads, sinks, k_scale, v_scale)
    xla = path_over(block_tables, pages)
    chosen = resolve_backend(
        name_in_slabs(validate.OP, pages), backend, _reasons(q, pages, mask, num_kv_heads, share), xla
    )
    options: dict[str, Any] = {
        "mask": mask,
        "sink_tokens": sink_tokens,
        "num_kv_heads": num_kv_heads,
        "sm_scale": float(sm_scale),
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    of_plain = options | {"share": share}
    is_decode = chosen in ("tpu", "reference") and is_decode_step(validate.OP, schedule, q.shape[0], backend)
    of_tpu = of_plain | {"return_lse": return_lse, "new_kv": new_kv, "slot_mapping": slot_mapping}
    of_tpu["is_decode"] = is_decode
    if chosen == "tpu" and new_kv is not None and slot_mapping is not None:
        check_write(*new_kv, pages, slot_mapping, k_scale, v_scale)
    if chosen == "tpu":
        kernel = kernel_tpu.ragged_paged_attention
        chosen = memory.with_room(validate.OP, backend, kernel, q, page_arrays(pages), *step, **of_tpu)
    if new_kv is not None and slot_mapping is not None and chosen != "tpu":
        pages = kv_write(*new_kv, pages, slot_mapping, k_scale=k_scale, v_scale=v_scale, backend=backend)
    arguments = (q, page_arrays(pages), *step)
    if chosen == "tpu":
        out, lse, written = kernel(*arguments, **of_tpu)
        pages = pages if written is None else replaced(pages, 0, written)
    elif chosen == "gpu":
        of_gpu = options | {"return_lse": return_lse, "schedule": schedule}
        out, lse = kernel_gpu.ragged_paged_attention(*arguments, **of_gpu)
    elif chosen in ("xla", "triton"):
        of_plain["by_triton"] = triton.Limits() if chosen == "triton" else None
        out, lse = xla_attention.ragged_paged_attention(*arguments, **of_plain)
    else:
        out, lse = reference.ragged_paged_attention(*arguments, **of_plain, is_decode=is_decode)
    return AttentionOutput(out, lse if return_lse else None, page_arrays(pages))


def mask_of(
    causal: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    num_sink_tokens: int | jax.Array | np.ndarray,
) -> tuple[MaskRule, Any]:
    """(the mask, int32[S] sink tokens where each sequence has its own)."""
    if isinstance(num_sink_tokens, jax.Array | np.ndarray):
        return MaskRule(causal, sliding_window, attention_chunk_size, sinks_by_sequence=True), num_sink_tokens
    return MaskRule(causal, sliding_window, attention_chunk_size, num_sink_tokens), None


def _reasons(
    q: Any,
    pages: tuple[Any, ...],
    mask: MaskRule,
    num_kv_heads: int,
    share: KeyShare | None = None,
) -> dict[str, Reason]:
    """Platforms with a kernel, each with what of a call it cannot do."""
    return {
        "tpu": lambda: kernel_tpu.reason_not_supported(pages, mask, num_kv_heads, share),
        "gpu": NO_SHARES if share is not None else lambda: kernel_gpu.reason_not_supported(q, pages, num_kv_heads),
        "triton": lambda: triton.reason_not_supported(pages, is_split=len(pages) == 2),
    }
