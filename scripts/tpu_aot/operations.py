"""What can be compiled: (op, shape) -> a function and the shapes of its arguments.

Imported in the process that compiles, after `prepare_environment`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.key_share import KeyShare
from pallas_kernels.layouts import PageLayout, attention_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_tpu
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from scripts.aot.arguments import argument
from scripts.aot.rooms import compiled_types, shape_settings, traced

# Slots of the pages by default: so many that XLA cannot keep the pages in VMEM, which it does with a small array.
POOL_TOKENS = 1 << 19


@dataclass(frozen=True)
class PagedCase:
    """Sizes of the pages that an op works on."""

    kv_heads: int = 8
    head_dim: int = 128
    page: int = 128
    dtype: str = "bfloat16"  # of the pages
    num_pages: int = 0  # 0: `POOL_TOKENS`

    def layout(self, page_size: int) -> PageLayout:
        """Of pages of `page_size` tokens."""
        return attention_layout(
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, page_size=page_size, dtype=self.dtype, platform="tpu"
        )

    @property
    def pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The page arrays."""
        num_pages = self.num_pages or POOL_TOKENS // self.page
        return tuple(argument(array.shape(num_pages), array.dtype) for array in self.layout(self.page).arrays)


@dataclass(frozen=True)
class AttentionCase(PagedCase):
    """Sizes and features of one compilation of ragged_paged_attention."""

    heads: int = 32
    q_dtype: str = "bfloat16"
    seqs: int = 64
    tokens: int = 512
    context: int = 8192  # tokens of the longest sequence
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    sinks: int = 0
    scales: int = 0
    lse: int = 0
    causal: int = 1
    hbm_tables: int = 0
    write: int = 0  # new KV is written first
    ranks: int = 1  # of context parallelism; the longest sequence lies on all of them
    queries: int = 0  # 0: by the shapes
    decode_block: int = 0
    tile_block: int = 0
    tuned: int = 0  # sizes of the chip's tuned file, if it has the shape, instead of these

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""
        return MaskRule(bool(self.causal), self.window or None, self.chunk or None, self.sink_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in HBM."""
        return self.layout(self.page).page_bytes // self.page


def attention(case: AttentionCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The kernel itself, without the write of new KV."""
    columns = -(-case.context // (case.page * case.ranks))
    q = argument((case.tokens, case.heads, case.head_dim), case.q_dtype)
    ints = [argument(shape, "int32") for shape in ((case.seqs, columns), (case.seqs,), (case.seqs + 1,), (3,))]
    new = argument((case.tokens, case.kv_heads, case.head_dim), "bfloat16")
    given = (new, new, argument((case.tokens,), "int32")) if case.write else ()
    per_head = [argument((case.heads,), "float32")] * bool(case.sinks)
    per_head += [argument((case.kv_heads,), "float32")] * 2 * bool(case.scales)
    sizes = kernel_tpu.Tuning(case.queries or None, case.decode_block or None, case.tile_block or None)
    rank = argument((), "int32") if case.ranks > 1 else None

    def call(q: Any, pages: Any, step: Any, new: Any, rank: Any, *per_head: Any) -> Any:
        given = list(per_head)
        return kernel_tpu.ragged_paged_attention(
            q,
            pages,
            *step,
            mask=case.mask,
            num_kv_heads=case.kv_heads,
            sm_scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap or None,
            sinks=given.pop(0) if case.sinks else None,
            k_scale=given.pop(0) if case.scales else None,
            v_scale=given.pop(0) if case.scales else None,
            return_lse=bool(case.lse),
            share=None if rank is None else KeyShare(rank, case.ranks),
            new_kv=new[:2] or None,
            slot_mapping=new[2] if new else None,
            tuning=None if case.tuned else sizes,
            tables_in_hbm=True if case.hbm_tables else None,
        )

    return call, (q, case.pages, ints, given, rank, *per_head)


def attention_shapes(num_shards: int) -> Iterator[tuple[str, list[str]]]:
    """(label, settings) of the model shapes that split into so many shards."""
    for shape in SHAPES:
        heads = _heads(shape, num_shards)
        if heads is not None:
            options = {
                "head_dim": shape.head_dim,
                "window": shape.sliding_window,
                "chunk": shape.attention_chunk_size,
                "soft_cap": shape.soft_cap,
                "sinks": int(shape.sinks),
            }
            given = [f"{name}={value}" for name, value in options.items() if value]
            settings = [f"heads={heads[0]}", f"kv_heads={heads[1]}", *given]
            yield shape.name, settings
            if heads[1] == 1:  # two tokens share words
                yield f"{shape.name}, fp8", [*settings, "dtype=float8_e4m3fn"]


def _heads(shape: AttentionShape, num_shards: int) -> tuple[int, int] | None:
    """(query heads, KV heads) of a shard; None: they do not divide."""
    try:
        return shape.per_shard(num_shards)
    except ValueError:
        return None


OPERATIONS: dict[str, tuple[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]]] = {
    "attention": (AttentionCase, attention),
    **{op: (case_type, functools.partial(traced, backend="tpu")) for op, case_type in compiled_types("tpu").items()},
}

# What tpu_compile_all.py compiles: number of shards -> (label, settings) of each shape that splits into so many.
SHAPE_CASES: dict[str, Callable[[int], Iterable[tuple[str, list[str]]]]] = {
    "attention": attention_shapes,
    **{op: functools.partial(shape_settings, case_type) for op, case_type in compiled_types("tpu").items()},
}
