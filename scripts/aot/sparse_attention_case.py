"""Cases of DeepSeek V4's attention: a model of sparse_mla_attention/shapes.py, one of its shards, a kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.latent_entries import EntryFormat, LatentFp8, Plain
from pallas_kernels.layouts import latent_layout
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.sparse_mla_attention.shapes import SHAPES
from scripts.aot.arguments import argument

# Bytes of each cache: so many that XLA cannot keep the pages in a TPU's VMEM, which it does with a small array.
POOL_BYTES = 1 << 29
BLOCK_TOKENS = 256  # of a compressed cache's pages


@dataclass(frozen=True)
class SparseCase:
    """Sizes of one compilation of sparse_mla_attention."""

    model: str = "deepseek-v4-flash"
    shards: int = 1  # tensor parallelism
    ratio: int = 4  # 0: the window only; 4: with an indexer; 128: all entries
    fp8: int = 1  # entries in fp8, else bfloat16
    page: int = 64  # states of the window's pages
    seqs: int = 64
    tokens: int = 512
    context: int = 131072
    lse: int = 0


def attention(case: SparseCase, backend: str = "tpu") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The kernels and the schedule, without the write of new latents."""
    (model,) = (shape for shape in SHAPES if shape.name == case.model)
    entries: EntryFormat = LatentFp8(model.rope_dim) if case.fp8 else Plain()
    dtype = "int8" if case.fp8 else "bfloat16"
    heads = model.per_shard(case.shards)

    def pages(page_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        layout = latent_layout(head_dim=entries.width(model.dim), page_size=page_size, dtype=dtype, platform=backend)
        return tuple(argument(a.shape(POOL_BYTES // layout.page_bytes), a.dtype) for a in layout.arrays)

    entry_page = BLOCK_TOKENS // (case.ratio or BLOCK_TOKENS)
    columns = -(-case.context // BLOCK_TOKENS)
    compressed: dict[str, Any] = {}
    if case.ratio:
        compressed = {
            "compressed_pages": pages(entry_page),
            "compressed_tables": argument((case.seqs, columns), "int32"),
        }
    if case.ratio == 4:
        compressed["topk_indices"] = argument((case.tokens, model.topk), "int32")
    shapes = ((case.seqs, -(-case.context // case.page)), (case.seqs,), (case.seqs + 1,), (3,))
    step = tuple(argument(shape, "int32") for shape in shapes)

    def call(q: Any, window: Any, step: Any, compressed: Any, sinks: Any) -> Any:
        result = sparse_mla_attention(
            q,
            window,
            *step,
            **compressed,
            tokens_per_state=case.ratio or None,
            sm_scale=model.sm_scale,
            sliding_window=model.sliding_window,
            sinks=sinks,
            return_lse=bool(case.lse),
            entries=entries,
            page_size=case.page,
            compressed_page_size=entry_page if case.ratio else None,
            backend=backend,
        )
        return result.out, result.lse

    q = argument((case.tokens, heads, model.dim), "bfloat16")
    return call, (q, pages(case.page), step, compressed, argument((heads,), "float32"))


def sparse_shapes(num_shards: int) -> list[tuple[str, list[str]]]:
    """Every model and kind of layer, over fp8 entries, and over bfloat16 ones where an indexer picks them."""
    shapes = [shape for shape in SHAPES if shape.num_q_heads % num_shards == 0]
    layers = [(shape.name, ratio, 1) for shape in shapes for ratio in (0, *shape.ratios)]
    layers += [(shape.name, 4, 0) for shape in shapes]
    return [
        (
            f"{name} ratio {ratio} {'fp8' if fp8 else 'bfloat16'}",
            [f"model={name}", f"shards={num_shards}", f"ratio={ratio}", f"fp8={fp8}"],
        )
        for name, ratio, fp8 in layers
    ]
