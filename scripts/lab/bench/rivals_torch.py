"""PyTorch's attention over contiguous K and V, timed by CUDA events, where torch is installed.

Flow:    Arguments of `rivals_gpu.gathered` -> torch tensors, the same memory -> [time] -> Timing
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.cases.case import Arguments
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from scripts.lab.bench.timing import Timing

_CALLS_PER_SAMPLE = 20

# Makes a call of (q, k, v) [batch, heads, tokens, D] out of a case and (query tokens, tokens).
Attention = Callable[[AttentionCase, int, int], Callable[[Any, Any, Any], Any]]


def time(attention: Attention, case: AttentionCase, rotated: list[Arguments], repeats: int) -> Timing:
    """Samples of batches of calls, each on the next of the rotated arguments, between two events.

    Raises:
        NotImplementedError: there is no torch, or none that sees the GPU.
    """
    torch = installed()
    if not torch.cuda.is_available():
        raise NotImplementedError("torch without CUDA")
    inputs = [tensors(arguments) for arguments in rotated]
    call = attention(case, inputs[0][0].shape[2], inputs[0][1].shape[2])
    return by_events([functools.partial(call, *arrays) for arrays in inputs], repeats)


def by_events(calls: Sequence[Callable[[], Any]], repeats: int) -> Timing:
    """Samples of batches of calls, one after the other over `calls`, between two events."""
    torch = installed()
    for call in calls:
        call()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(_CALLS_PER_SAMPLE):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / _CALLS_PER_SAMPLE)
    return Timing(tuple(samples), "cuda events")


def installed() -> Any:
    """torch.

    Raises:
        NotImplementedError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise NotImplementedError("torch is not installed") from error
    return torch


def tensors(arguments: Arguments) -> tuple[Any, Any, Any]:
    """(q, k, v) [batch, heads, tokens, D] in the memory of the arrays."""
    torch = installed()
    arrays = (arguments.rest, *arguments.pages)
    return tuple(torch.from_dlpack(array).transpose(1, 2).contiguous() for array in arrays)


def sdpa(case: AttentionCase, q_len: int, length: int) -> Callable[[Any, Any, Any], Any]:
    """torch.nn.functional.scaled_dot_product_attention, whichever of its kernels it takes."""
    if case.window and q_len > 1:
        raise NotImplementedError("windows need a mask as large as the scores")
    attend = installed().nn.functional.scaled_dot_product_attention
    options = {"scale": case.scale, "is_causal": q_len == length > 1, "enable_gqa": True}
    return lambda q, k, v: attend(q, k, v, **options)


def flex(case: AttentionCase, q_len: int, length: int) -> Callable[[Any, Any, Any], Any]:
    """FlexAttention, compiled, with a mask of blocks."""
    torch = installed()
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    past = length - q_len

    def is_visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        causal = key <= query + past
        return causal & (query + past - key < case.window) if case.window else causal

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = create_block_mask(is_visible, None, None, q_len, length, device=device)
    attend = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=mask, scale=case.scale, enable_gqa=True)


ATTENTIONS: dict[str, Attention] = {"torch sdpa": sdpa, "torch flex_attention": flex}
