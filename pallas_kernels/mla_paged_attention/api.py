"""Multi-head latent attention of ragged queries over paged latents: decode, prefill and mixed in one call.

Flow:    absorbed queries, latent pages, block tables, lengths -> [mla_paged_attention] -> AttentionOutput
         lengths of a step -> [plan] -> schedule, for all layers with the same shapes and mask
Source:  DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix B) in its absorbed form; masks, sinks and the order of
         sequences are those of ragged_paged_attention

The cache holds one vector per token, the normed latent c and the rotated key r side by side. With the key projection
absorbed into the query and the value projection left to the caller, a head's logit is `q_nope . c + q_pe . r` and its
value is c: attention with one KV head whose values are the first numbers of its keys.

Axis names: as ragged_paged_attention; Dl latent dimension (512 in DeepSeek V3), Dr rotary dimension (64).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention_checks
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.backends import Reason, resolve_backend
from pallas_kernels.decode_step import DecodeStep, is_decode_step
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.key_share import NO_SHARES, KeyShare
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.latent_write import latent_write
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import reference, validate, xla_attention
from pallas_kernels.slab_pages import name_in_slabs, page_arrays
from pallas_kernels.xla.walks import path_over

if TYPE_CHECKING:
    from pallas_kernels.mla_paged_attention import kernel_gpu, kernel_tpu
    from pallas_kernels.tpu import memory
    from pallas_kernels.triton import walks as triton
else:
    kernel_gpu = lazy("pallas_kernels.mla_paged_attention.kernel_gpu")
    kernel_tpu = lazy("pallas_kernels.mla_paged_attention.kernel_tpu")
    memory = lazy("pallas_kernels.tpu.memory")
    triton = lazy("pallas_kernels.triton.walks")


@by_default_rules
def plan(
    q_nope: Any,  # [T, Hq, Dl]; of it, `q_pe` and the pages shapes and dtypes alone: arrays or ShapeDtypeStructs
    q_pe: Any,  # [T, Hq, Dr]
    pages: tuple[Any, ...],
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    distribution: Any,
    mask: MaskRule,  # what the layers' options say
    *,
    page_size: int | None = None,
    is_decode: bool = False,  # every sequence has at most T / S queries, known when the step is traced
    backend: str = "auto",
) -> Any:
    """As `ragged_paged_attention.plan`, of layers that attend over latents.

    Raises:
        ValueError: as there.
        NotImplementedError: as the op.
    """
    attention_checks.check_mask(validate.OP, mask)
    latent = validate.check_latents(q_nope, q_pe, pages, page_size)
    step = (block_tables, seq_lens, query_start_loc, distribution)
    attention_checks.check_batch(validate.OP, q_nope.shape[0], latent.page_size, *step)
    attention_checks.check_decode(validate.OP, q_nope.shape[0], query_start_loc, distribution, is_decode)
    xla = path_over(block_tables, page_arrays(pages))
    chosen = resolve_backend(name_in_slabs(validate.OP, pages), backend, _reasons(q_nope, q_pe, latent, mask), xla)
    if chosen in ("tpu", "reference") and is_decode and q_nope.shape[0] == seq_lens.shape[0]:
        return DecodeStep(q_nope.shape[0])
    if chosen != "gpu":
        return None
    sizes: dict[str, Any] = {"page_size": latent.page_size, "is_decode": is_decode}
    return kernel_gpu.plan(q_nope, q_pe, latent.array, *step[1:], mask=mask, **sizes)


@by_default_rules
def mla_paged_attention(
    q_nope: jax.Array,  # [T, Hq, Dl] queries times the key projection of their head
    q_pe: jax.Array,  # [T, Hq, Dr] rotated
    pages: tuple[jax.Array, ...],  # as pallas_kernels.layouts: (latent,) of Dl + Dr numbers a state
    block_tables: jax.Array,  # int32[S, P] page ids, padded with 0
    seq_lens: jax.Array,  # int32[S] tokens visible to the last query of each sequence, 0 for empty rows
    query_start_loc: jax.Array,  # int32[S + 1] first query token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    *,
    new_kv: tuple[jax.Array, jax.Array] | None = None,  # [T, Dl], [T, Dr]: written before attention
    slot_mapping: jax.Array | None = None,  # int32[T] slots of new_kv, -1: skip
    sm_scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    num_sink_tokens: int = 0,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # float32[Hq] natural-log logits, -inf: none
    k_scale: jax.Array | None = None,  # float32[]: pages hold the vectors / k_scale, keys and values alike
    schedule: Any = None,  # what `plan` returned for this step, or None
    return_lse: bool = False,
    page_size: int | None = None,  # states of a page; None: as many as there is room for, packing included
    context_rank: Any = 0,  # int or int32[]: whose tokens the pages hold, of `context_size` ranks that share them
    context_size: int = 1,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention over latents of all query tokens: `out` is [T, Hq, Dl], to be multiplied by the value projection.

    Who sees what, padding, NaN in hidden slots, context parallelism and the order of `new_kv` are as of
    `ragged_paged_attention`.

    Raises:
        ValueError: shapes, dtypes, options or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    mask = MaskRule(causal, sliding_window, attention_chunk_size, num_sink_tokens)
    attention_checks.check_mask(validate.OP, mask)
    attention_checks.check_scalars(validate.OP, sm_scale, soft_cap)
    latent = validate.check_latents(q_nope, q_pe, pages, page_size)
    validate.check_new_kv(q_nope, q_pe, new_kv, slot_mapping, latent)
    share = KeyShare.of_options(validate.OP, context_rank, context_size, sinks)
    step = (block_tables, seq_lens, query_start_loc, distribution)
    attention_checks.check_batch(validate.OP, q_nope.shape[0], latent.page_size * context_size, *step)
    validate.check_per_head(q_nope.shape[1], sinks, k_scale)
    pages = page_arrays(pages)
    xla = path_over(block_tables, pages)
    chosen = resolve_backend(
        name_in_slabs(validate.OP, pages), backend, _reasons(q_nope, q_pe, latent, mask, share), xla
    )
    options: dict[str, Any] = {
        "mask": mask,
        "sm_scale": float(sm_scale),
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "sinks": sinks,
        "k_scale": k_scale,
        "page_size": latent.page_size,
    }
    arguments = (q_nope, q_pe, pages, *step)
    of_plain = options | {"share": share}
    is_decode = chosen in ("tpu", "reference") and is_decode_step(validate.OP, schedule, q_nope.shape[0], backend)
    of_tpu = of_plain | {"return_lse": return_lse, "is_decode": is_decode}
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.mla_paged_attention, *arguments, **of_tpu)
    if new_kv is not None and slot_mapping is not None:
        states = jnp.concatenate(new_kv, axis=-1)
        pages = latent_write(states, pages, slot_mapping, scale=k_scale, page_size=latent.page_size, backend=backend)
    if chosen == "tpu":
        out, lse = kernel_tpu.mla_paged_attention(q_nope, q_pe, pages, *step, **of_tpu)
    elif chosen == "gpu":
        out, lse = kernel_gpu.mla_paged_attention(q_nope, q_pe, pages, *step, **options, schedule=schedule)
    elif chosen in ("xla", "triton"):
        of_plain["by_triton"] = triton.Limits() if chosen == "triton" else None
        out, lse = xla_attention.mla_paged_attention(q_nope, q_pe, pages, *step, **of_plain)
    else:
        out, lse = reference.mla_paged_attention(q_nope, q_pe, pages, *step, **of_plain, is_decode=is_decode)
    return AttentionOutput(out, lse if return_lse else None, pages)


def _reasons(
    q_nope: Any, q_pe: Any, latent: LatentPages, mask: MaskRule, share: KeyShare | None = None
) -> dict[str, Reason]:
    """Platforms with a kernel, each with what of a call it cannot do."""
    return {
        "tpu": lambda: kernel_tpu.reason_not_supported(latent, mask, share),
        "gpu": NO_SHARES if share is not None else lambda: kernel_gpu.reason_not_supported(q_nope, q_pe, latent),
        "triton": lambda: triton.reason_not_supported((latent.array,)),
    }
