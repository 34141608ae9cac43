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
    """Sizes and features of one compilation of an attention kernel."""

    shape: str = ""  # of shapes.py: sets heads, dimension, window, chunk, soft cap and sinks
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    page: int = 16
    dtype: str = ""  # of the pages; "": q_dtype
    q_dtype: str = "bfloat16"
    seqs: int = 64
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


def decode(case: AttentionCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The decode kernel and the merge of its pieces."""
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
    tables = _array((case.seqs, -(-case.context // case.page)), "int32")
    q = _array((case.seqs, case.heads, case.head_dim), case.q_dtype)
    ints = [_array(shape, "int32") for shape in ((case.seqs,), (case.seqs,), ())]
    per_head = [_array((n,), "float32") for n in (case.heads, case.kv_heads, case.kv_heads)]
    mask = MaskRule(bool(case.causal), case.window or None, case.chunk or None, case.sink_tokens)
    tuning = kernel_gpu.Tuning(case.block or None, case.stages or None)
    scalars = case.head_dim**-0.5, case.soft_cap or None

    def call(q: Any, pages: Any, tables: Any, lens: Any, q_lens: Any, num_decode: Any, *per_head: Any) -> Any:
        step = kernel_gpu.Step.of(q, pages, tables, mask, *scalars, *per_head, tuning)
        return kernel_gpu.decode(step, q, lens, q_lens, num_decode)

    return call, (q, pages, tables, *ints, *per_head)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


OPERATIONS: dict[str, tuple[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]]] = {
    "decode": (AttentionCase, decode),
}
