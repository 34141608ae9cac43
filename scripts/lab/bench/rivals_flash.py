"""FlashInfer over our own pages, FlashAttention 3 where it is installed, timed by CUDA events.

Flow:    Arguments of our case -> torch tensors, the same memory -> [time] -> Timing
Source:  flashinfer.BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper, which plan before the
         clock starts; flash_attn_interface.flash_attn_with_kvcache (FlashAttention 3 takes pages of any size)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels.cases.case import Arguments
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from scripts.lab.bench import rivals_torch
from scripts.lab.bench.timing import Timing

_WORKSPACE_BYTES = 256 << 20

# Makes a call without arguments of a case, torch tensors (q, K pages, V pages) and (tables, lengths, starts).
Paged = Callable[[AttentionCase, tuple[Any, ...], tuple[Any, ...]], Callable[[], Any]]


def time(make: Paged, case: AttentionCase, rotated: list[Arguments], repeats: int) -> Timing:
    """Samples of batches of calls, each on the next of the rotated arguments.

    Raises:
        NotImplementedError: there is no torch that sees the GPU, or the rival is not installed or cannot do the case.
    """
    torch = rivals_torch.installed()
    if not torch.cuda.is_available():
        raise NotImplementedError("torch without CUDA")
    calls = []
    for arguments in rotated:
        q, (tables, lengths, starts, _), *_ = arguments.rest
        arrays = tuple(torch.from_dlpack(array) for array in (q, *arguments.pages))
        step = tuple(torch.from_dlpack(array) for array in (tables, lengths, starts))
        calls.append(make(case, arrays, step))
    return rivals_torch.by_events(calls, repeats)


def flashinfer(case: AttentionCase, arrays: tuple[Any, ...], step: tuple[Any, ...]) -> Callable[[], Any]:
    """Its decode or prefill wrapper, planned for the step."""
    try:
        import flashinfer as library
    except ImportError as error:
        raise NotImplementedError("flashinfer is not installed") from error
    torch = rivals_torch.installed()
    q, k_pages, v_pages = arrays
    tables, lengths, starts = step
    page = case.page
    counts = (lengths + page - 1) // page
    first = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).int()
    named = torch.cat([row[:count] for row, count in zip(tables, counts.tolist(), strict=True)])
    pages = (first, named, ((lengths - 1) % page + 1).int())
    sizes = (case.heads, case.kv_heads, case.head_dim, page)
    options = {
        "sm_scale": case.scale,
        "window_left": case.window - 1 if case.window else -1,
        "logits_soft_cap": case.soft_cap or None,
        "q_data_type": q.dtype,
        "kv_data_type": k_pages.dtype,
    }
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    if case.tokens == case.seqs:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(*pages, *sizes, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts, *pages, *sizes, causal=True, **options)
    return lambda: wrapper.run(q, (k_pages, v_pages))


def flash_attention(case: AttentionCase, arrays: tuple[Any, ...], step: tuple[Any, ...]) -> Callable[[], Any]:
    """FlashAttention 3 over pages."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        raise NotImplementedError("FlashAttention 3 (flash_attn_interface) is not installed") from error
    q, k_pages, v_pages = arrays
    tables, lengths, starts = step
    options = {
        "softmax_scale": case.scale,
        "causal": True,
        "window_size": (case.window - 1, 0) if case.window else (-1, -1),
        "softcap": case.soft_cap,
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(q_len for q_len, _ in case.step_rows),
        "cache_seqlens": lengths,
        "page_table": tables,
    }
    return lambda: flash_attn_with_kvcache(q, k_pages, v_pages, **options)


PAGED: dict[str, Paged] = {"flashinfer": flashinfer, "flash-attention 3": flash_attention}
