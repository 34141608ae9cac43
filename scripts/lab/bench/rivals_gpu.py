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

from pallas_kernels.cases.case import Arguments, Case
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from scripts.lab.bench import rivals_flash, rivals_torch
from scripts.lab.bench.platform import Rival

CONTIGUOUS = "contiguous KV"
UPSTREAM, CUDNN = "jax paged_attention", "jax.nn cudnn"
NAMES = (UPSTREAM, CUDNN, *rivals_torch.ATTENTIONS, *rivals_flash.PAGED)


class Uniform(NamedTuple):
    """Sequences of one kind."""

    batch: int
    q_len: int
    length: int


def rivals(case: Case) -> Iterator[Rival]:
    """Of attention alone."""
    if not isinstance(case, AttentionCase):
        return
    yield Rival(UPSTREAM, functools.partial(_paged, case), functools.partial(decode, case))
    contiguous = functools.partial(gathered, case)
    yield Rival(CUDNN, contiguous, functools.partial(dense, case), note=CONTIGUOUS)
    for name, attend in rivals_torch.ATTENTIONS.items():
        timed = functools.partial(rivals_torch.time, attend, case)
        yield Rival(name, contiguous, time=timed, note=CONTIGUOUS)
    for name, attend in rivals_flash.PAGED.items():
        yield Rival(name, functools.partial(_ours, case), time=functools.partial(rivals_flash.time, attend, case))


def uniform(case: AttentionCase) -> Uniform:
    """The sequences of the step, where all are alike.

    Raises:
        NotImplementedError: they differ.
    """
    kinds = set(case.step_rows)
    if len(kinds) > 1:
        raise NotImplementedError("sequences of one length alone")
    ((q_len, length),) = kinds
    return Uniform(case.seqs, q_len, length)


def _ours(case: AttentionCase, arguments: Arguments) -> Arguments:
    """Our own pages [pages, page_size, heads, D] of K and of V."""
    uniform(case)
    if case.sinks or case.chunk:
        raise NotImplementedError("no sinks or chunks")
    return arguments


def _paged(case: AttentionCase, arguments: Arguments) -> Arguments:
    """Heads first."""
    if case.tokens != case.seqs:
        raise NotImplementedError("decode alone")
    return Arguments(tuple(array.transpose(2, 0, 1, 3) for array in arguments.pages), arguments.rest)


def decode(case: AttentionCase, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """Upstream's kernel as it comes; it splits a sequence by 16 where the table divides so."""
    q, (tables, lengths, *_), *_ = rest
    if case.sinks or case.window or case.chunk:
        raise NotImplementedError("no sinks, windows or chunks")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    k_splits = math.gcd(tables.shape[1], 16)
    out = paged_attention(
        q * jnp.asarray(case.scale, q.dtype),
        *pages,
        tables,
        lengths,
        k_splits=k_splits,
        pages_per_compute_block=math.gcd(tables.shape[1] // k_splits, 8),
        attn_logits_soft_cap=case.soft_cap or None,
    )
    return out, ()


def gathered(case: AttentionCase, arguments: Arguments) -> Arguments:
    """pages: (K, V) [batch, tokens, heads, D]; rest: q [batch, q_len, heads, D]."""
    sizes = uniform(case)
    q, (tables, *_), *_ = arguments.rest
    if case.sinks or case.soft_cap or case.chunk:
        raise NotImplementedError("no sinks, soft caps or chunks")
    if case.window and sizes.q_len != sizes.length:
        raise NotImplementedError("windows in prefill alone")

    def of_sequences(pages: jax.Array) -> jax.Array:
        return pages[tables].reshape(sizes.batch, -1, *pages.shape[2:])[:, : sizes.length]

    kv = tuple(of_sequences(array) for array in arguments.pages)
    return Arguments(kv, q.reshape(sizes.batch, sizes.q_len, *q.shape[1:]))


def dense(case: AttentionCase, kv: Any, q: Any, *, implementation: str = "cudnn") -> tuple[Any, tuple[()]]:
    """The last query of a sequence is at its end: causal, and windowed, only where every token is a query."""
    is_prefill = q.shape[1] == kv[0].shape[1] and q.shape[1] > 1
    out = jax.nn.dot_product_attention(
        q,
        *kv,
        scale=case.scale,
        is_causal=is_prefill,
        local_window_size=(case.window - 1, 0) if case.window and is_prefill else None,
        implementation=implementation,
    )
    return out.reshape(-1, *out.shape[2:]), ()
