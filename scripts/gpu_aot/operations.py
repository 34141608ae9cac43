"""What can be compiled: (op, case) -> a function, the shapes of its arguments, and which of them are donated.

Imported in the process that compiles, after `prepare_environment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pallas_kernels.cases.case import Case
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import attention_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_gpu
from pallas_kernels.ragged_paged_attention.shapes import SHAPES
from scripts.aot.arguments import argument
from scripts.aot.rooms import compiled_types, traced
from scripts.gpu_aot import layer_case


class Operation(NamedTuple):
    """What one compilation compiles."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes
    donated: tuple[int, ...] = ()  # arguments that are updated in place: page arrays
    layers: int = 0  # layers in the module, each in the scopes of `layer_case`; 0: it is not made of layers


@dataclass(frozen=True)
class AttentionCase:
    """Sizes and features of one compilation of ragged_paged_attention."""

    shape: str = ""  # of shapes.py: sets heads, dimension, window, chunk and soft cap
    tp: int = 1  # tensor-parallel shards of `shape`, of which one is compiled
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
    num_pages: int = 4099  # a number that no other axis has
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    causal: int = 1
    block: int = 0  # 0: by the shape
    stages: int = 0
    warpgroups: int = 0  # of prefill
    blocks: int = 0  # thread blocks that go over its tiles; 0: one for each


def with_model_shape(case: AttentionCase) -> AttentionCase:
    """The case with what its `shape` says."""
    if not case.shape:
        return case
    known = {shape.name: shape for shape in SHAPES}
    if case.shape not in known:
        raise ValueError(f"expected a shape out of {sorted(known)}, got {case.shape!r}")
    shape = known[case.shape]
    heads, kv_heads = shape.per_shard(case.tp)
    return replace(
        case,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        window=shape.sliding_window or 0,
        chunk=shape.attention_chunk_size or 0,
        soft_cap=shape.soft_cap or 0.0,
    )


def attention(case: AttentionCase) -> Operation:
    """A layer's step: the write of new KV, decode, the merge of its pieces, prefill."""
    case = with_model_shape(case)
    pages, new_kv, slots = _written(case)
    columns = -(-case.context // case.page)
    q = argument((case.tokens, case.heads, case.head_dim), case.q_dtype)
    ints = [argument(shape, "int32") for shape in ((case.seqs, columns), (case.seqs,), (case.seqs + 1,), (3,))]
    per_head = [argument((n,), "float32") for n in (case.heads, case.kv_heads, case.kv_heads)]
    tuning = kernel_gpu.Tuning(
        decode_block=case.block or None,
        decode_stages=case.stages or None,
        prefill_block=case.block or None,
        prefill_stages=case.stages or None,
        prefill_warpgroups=case.warpgroups or None,
        prefill_blocks=case.blocks or None,
    )

    def call(q: Any, pages: Any, new_kv: Any, slots: Any, *rest: Any) -> Any:
        pages = kv_write(*new_kv, pages, slots, k_scale=rest[-2], v_scale=rest[-1], backend="gpu")
        result = kernel_gpu.ragged_paged_attention(
            q,
            pages,
            *rest[:4],
            mask=MaskRule(bool(case.causal), case.window or None, case.chunk or None, case.sink_tokens),
            num_kv_heads=case.kv_heads,
            sm_scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap or None,
            **dict(zip(("sinks", "k_scale", "v_scale"), rest[4:], strict=True)),
            return_lse=True,
            tuning=tuning,
        )
        return *result, pages

    return Operation(call, (q, pages, new_kv, slots, *ints, *per_head), donated=(1,))


def of_room(case: Case) -> Operation:
    """An op of pallas_kernels by its case."""
    return Operation(*traced(case, "gpu"), donated=(0,) if case.writes else ())


def planned_layers(case: layer_case.LayersCase) -> Operation:
    """Layers that share the plan of a step."""
    return Operation(*layer_case.layers(case), layers=1 if case.scan else case.layers)


def _written(case: AttentionCase) -> tuple[Any, Any, Any]:
    """(pages, new K and V, slots)."""
    layout = attention_layout(
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v or None,
        page_size=case.page,
        dtype=case.dtype or case.q_dtype,
        platform="gpu",
    )
    pages = tuple(argument(array.shape(case.num_pages), array.dtype) for array in layout.arrays)
    new_kv = tuple(argument((case.tokens, *array.shape[2:]), case.q_dtype) for array in pages)
    return pages, new_kv, argument((case.tokens,), "int32")


OPERATIONS: dict[str, tuple[type, Callable[[Any], Operation]]] = {
    "attention": (AttentionCase, attention),
    "layers": (layer_case.LayersCase, planned_layers),
    **{op: (case_type, of_room) for op, case_type in compiled_types("gpu").items()},
}
