"""Other attention on NVIDIA GPUs, on the numbers of our case: upstream JAX's paged decode, cuDNN's, PyTorch's, others.

Source: jax.experimental.pallas.ops.gpu.paged_attention; jax.nn.dot_product_attention(implementation="cudnn");
        torch.nn.functional.scaled_dot_product_attention; torch.nn.attention.flex_attention; FlashInfer; FlashAttention

Upstream JAX's reads pages [heads, pages, page_size, D] of its own; FlashInfer and FlashAttention 3 read ours. For the
others K and V are gathered into one array before the clock starts, which a server's cache would have to copy: their
rows say "contiguous KV". The sequences of a case must be equally long; none of them has sinks or chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import Arguments
from scripts.kernel_bench import rivals_flash, rivals_torch
from scripts.kernel_bench.case import BenchCase
from scripts.kernel_bench.ops import ragged_paged_attention as attention
from scripts.kernel_bench.platform import Rival

CONTIGUOUS = "contiguous KV"
UPSTREAM, CUDNN = "jax paged_attention", "jax.nn cudnn"
NAMES = (UPSTREAM, CUDNN, *rivals_torch.ATTENTIONS, *rivals_flash.PAGED)


class Uniform(NamedTuple):
    """Sequences of one kind."""

    batch: int
    q_len: int
    length: int


def rivals(case: BenchCase) -> Iterator[Rival]:
    """Of attention alone."""
    if case.op != attention.OP:
        return
    setting = case.setting
    yield Rival(UPSTREAM, functools.partial(_paged, setting), functools.partial(decode, setting))
    contiguous = functools.partial(gathered, setting)
    yield Rival(CUDNN, contiguous, functools.partial(dense, setting), note=CONTIGUOUS)
    for name, attend in rivals_torch.ATTENTIONS.items():
        timed = functools.partial(rivals_torch.time, attend, setting.shape)
        yield Rival(name, contiguous, time=timed, note=CONTIGUOUS)
    for name, attend in rivals_flash.PAGED.items():
        yield Rival(name, functools.partial(_ours, setting), time=functools.partial(rivals_flash.time, attend, setting))


def uniform(setting: attention.Setting) -> Uniform:
    """The sequences of the step, where all are alike.

    Raises:
        NotImplementedError: they differ.
    """
    kinds = set(setting.step.rows)
    if len(kinds) > 1:
        raise NotImplementedError("sequences of one length alone")
    ((q_len, length),) = kinds
    return Uniform(len(setting.step.rows), q_len, length)


def _ours(setting: attention.Setting, arguments: Arguments) -> Arguments:
    """Our own pages [pages, page_size, heads, D] of K and of V."""
    uniform(setting)
    if arguments.rest[2] is not None or setting.shape.attention_chunk_size is not None:
        raise NotImplementedError("no sinks or chunks")
    return arguments


def _paged(setting: attention.Setting, arguments: Arguments) -> Arguments:
    """Heads first."""
    if setting.step.num_tokens != len(setting.step.rows):
        raise NotImplementedError("decode alone")
    return Arguments(tuple(array.transpose(2, 0, 1, 3) for array in arguments.pages), arguments.rest)


def decode(setting: attention.Setting, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """Upstream's kernel as it comes; it splits a sequence by 16 where the table divides so."""
    q, (tables, lengths, _, _), sinks = rest
    shape = setting.shape
    if sinks is not None or shape.sliding_window is not None or shape.attention_chunk_size is not None:
        raise NotImplementedError("no sinks, windows or chunks")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    k_splits = math.gcd(tables.shape[1], 16)
    out = paged_attention(
        q * jnp.asarray(shape.sm_scale, q.dtype),
        *pages,
        tables,
        lengths,
        k_splits=k_splits,
        pages_per_compute_block=math.gcd(tables.shape[1] // k_splits, 8),
        attn_logits_soft_cap=shape.soft_cap,
    )
    return out, ()


def gathered(setting: attention.Setting, arguments: Arguments) -> Arguments:
    """pages: (K, V) [batch, tokens, heads, D]; rest: q [batch, q_len, heads, D]."""
    sizes, shape = uniform(setting), setting.shape
    q, (tables, *_), sinks = arguments.rest
    if sinks is not None or shape.soft_cap is not None or shape.attention_chunk_size is not None:
        raise NotImplementedError("no sinks, soft caps or chunks")
    if shape.sliding_window is not None and sizes.q_len != sizes.length:
        raise NotImplementedError("windows in prefill alone")

    def of_sequences(pages: jax.Array) -> jax.Array:
        return pages[tables].reshape(sizes.batch, -1, *pages.shape[2:])[:, : sizes.length]

    kv = tuple(of_sequences(array) for array in arguments.pages)
    return Arguments(kv, q.reshape(sizes.batch, sizes.q_len, *q.shape[1:]))


def dense(setting: attention.Setting, kv: Any, q: Any, *, implementation: str = "cudnn") -> tuple[Any, tuple[()]]:
    """The last query of a sequence is at its end: causal, and windowed, only where every token is a query."""
    is_prefill = q.shape[1] == kv[0].shape[1] and q.shape[1] > 1
    window = setting.shape.sliding_window
    out = jax.nn.dot_product_attention(
        q,
        *kv,
        scale=setting.shape.sm_scale,
        is_causal=is_prefill,
        local_window_size=(window - 1, 0) if window is not None and is_prefill else None,
        implementation=implementation,
    )
    return out.reshape(-1, *out.shape[2:]), ()
