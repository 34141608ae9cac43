"""What can be compiled: (op, shape) -> a function and the shapes of its arguments.

Imported in the process that compiles, after `prepare_environment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import attention_layout
from pallas_kernels.ragged_paged_attention import kernel_gpu
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.shapes import SHAPES


@dataclass(frozen=True)
class AttentionCase:
    """Sizes and features of one compilation of ragged_paged_attention."""

    shape: str = ""  # of shapes.py: sets heads, dimension, window, chunk, soft cap and sinks
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    page: int = 16
    dtype: str = ""  # of the pages; "": q_dtype
    q_dtype: str = "bfloat16"
    seqs: int = 64
    tokens: int = 2048
    context: int = 4096  # tokens of the longest sequence
    num_pages: int = 4096
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    causal: int = 1
    block: int = 0  # 0: by the shape
    stages: int = 0


def with_model_shape(case: AttentionCase) -> AttentionCase:
    """The case with what its `shape` says."""
    if not case.shape:
        return case
    known = {shape.name: shape for shape in SHAPES}
    if case.shape not in known:
        raise ValueError(f"expected a shape out of {sorted(known)}, got {case.shape!r}")
    shape = known[case.shape]
    return replace(
        case,
        heads=shape.num_q_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        window=shape.sliding_window or 0,
        chunk=shape.attention_chunk_size or 0,
        soft_cap=shape.soft_cap or 0.0,
    )


def attention(case: AttentionCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The whole op without the write of new KV: decode, the merge of its pieces, prefill."""
    case = with_model_shape(case)
    layout = attention_layout(
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v or None,
        page_size=case.page,
        dtype=case.dtype or case.q_dtype,
        platform="gpu",
    )
    pages = tuple(_array(array.shape(case.num_pages), array.dtype) for array in layout.arrays)
    columns = -(-case.context // case.page)
    q = _array((case.tokens, case.heads, case.head_dim), case.q_dtype)
    ints = [_array(shape, "int32") for shape in ((case.seqs, columns), (case.seqs,), (case.seqs + 1,), (3,))]
    per_head = [_array((n,), "float32") for n in (case.heads, case.kv_heads, case.kv_heads)]
    tuning = kernel_gpu.Tuning(
        decode_block=case.block or None,
        decode_stages=case.stages or None,
        prefill_block=case.block or None,
        prefill_stages=case.stages or None,
    )

    def call(*arrays: Any) -> Any:
        return kernel_gpu.ragged_paged_attention(
            *arrays[:6],
            mask=MaskRule(bool(case.causal), case.window or None, case.chunk or None, case.sink_tokens),
            num_kv_heads=case.kv_heads,
            sm_scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap or None,
            **dict(zip(("sinks", "k_scale", "v_scale"), arrays[6:], strict=True)),
            return_lse=True,
            tuning=tuning,
        )

    return call, (q, pages, *ints, *per_head)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


OPERATIONS: dict[str, tuple[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]]] = {
    "attention": (AttentionCase, attention),
}
