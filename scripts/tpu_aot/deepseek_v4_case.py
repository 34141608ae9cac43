"""What of DeepSeek V4's attention can be compiled: sparse_mla_attention by kind of layer, indexer, compressor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.compressor_update import kernel_tpu as compressor_kernel
from pallas_kernels.compressor_update import max_new_entries
from pallas_kernels.indexer_topk import kernel_tpu as indexer_kernel
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from pallas_kernels.layouts import latent_layout
from pallas_kernels.sparse_mla_attention.shapes import SHAPES
from scripts.aot.arguments import argument
from scripts.aot.sparse_attention_case import BLOCK_TOKENS, POOL_BYTES, SparseCase, attention


@dataclass(frozen=True)
class CompressorCase:
    """Sizes of one compilation of compressor_update."""

    dim: int = 512  # 128: the indexer's
    ratio: int = 4  # with overlap; 128: without
    page: int = 4
    seqs: int = 64
    tokens: int = 512
    context: int = 131072


def compressor(case: CompressorCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """compressor_update, with the pages donated by its caller."""
    overlap = case.ratio == 4
    width = (1 + overlap) * case.dim
    layout = latent_layout(head_dim=2 * width, page_size=case.page, dtype="float32", platform="tpu")
    pages = tuple(argument(a.shape(POOL_BYTES // layout.page_bytes), a.dtype) for a in layout.arrays)
    room = max_new_entries(case.tokens, case.seqs, case.ratio)
    call = functools.partial(
        compressor_kernel.compressor_update, overlap=overlap, page_size=case.page, room=room
    )  # fmt: skip
    new = argument((case.tokens, width), "bfloat16")
    shapes = ((case.seqs, -(-case.context // case.page)), (case.seqs,), (case.seqs + 1,), (3,), (case.tokens,))
    return call, (new, new, pages, *(argument(s, "int32") for s in shapes), argument((case.ratio, width), "float32"))


@dataclass(frozen=True)
class IndexerCase:
    """Sizes of one compilation of indexer_topk; every shard has all its heads."""

    model: str = "deepseek-v4-flash"
    fp8: int = 1  # keys in fp8, else bfloat16
    seqs: int = 64
    tokens: int = 512
    context: int = 131072


def indexer(case: IndexerCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """indexer_topk of layers of the smallest ratio."""
    (model,) = (shape for shape in SHAPES if shape.name == case.model)
    ratio = model.ratios[0]
    entries: EntryFormat = IndexFp8() if case.fp8 else Plain()
    width, page = entries.width(model.index_dim), BLOCK_TOKENS // ratio
    layout = latent_layout(
        head_dim=width, page_size=page, dtype="int8" if case.fp8 else "bfloat16", platform="tpu"
    )  # fmt: skip
    pages = tuple(argument(a.shape(POOL_BYTES // layout.page_bytes), a.dtype) for a in layout.arrays)
    sizes = {"topk": model.topk, "tokens_per_state": ratio, "entries": entries, "page_size": page}
    q = argument((case.tokens, model.num_index_heads, model.index_dim), "bfloat16")
    shapes = ((case.seqs, -(-case.context // BLOCK_TOKENS)), (case.seqs,), (case.seqs + 1,), (3,))
    step = [argument(shape, "int32") for shape in shapes]
    call = functools.partial(indexer_kernel.indexer_topk, **sizes)
    return call, (q, argument((case.tokens, model.num_index_heads), "float32"), pages, *step)


OPERATIONS = {
    "sparse_attention": (SparseCase, attention),
    "indexer_topk": (IndexerCase, indexer),
    "compressor_update": (CompressorCase, compressor),
}


def attention_shapes(num_shards: int) -> list[tuple[str, list[str]]]:
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


# Indexers and compressors are whole on every shard.
SHAPE_CASES = {
    "sparse_attention": attention_shapes,
    "indexer_topk": lambda _: [
        (f"{shape.name} {name}", [f"model={shape.name}", f"fp8={fp8}"])
        for shape in SHAPES
        for name, fp8 in (("fp8", 1), ("bfloat16", 0))
    ],
    "compressor_update": lambda _: [
        ("ratio 4", ["ratio=4", "page=4"]),
        ("ratio 128", ["ratio=128", "page=8"]),
        ("indexer", ["dim=128", "ratio=4", "page=4"]),
    ],
}
