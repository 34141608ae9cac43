"""What of latent attention can be compiled: mla_paged_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.key_share import KeyShare
from pallas_kernels.layouts import PageLayout, latent_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import kernel_tpu as attention_kernel
from pallas_kernels.mla_paged_attention.shapes import SHAPES
from scripts.aot.arguments import argument

# Slots of the pages by default: so many that XLA cannot keep the pages in VMEM, which it does with a small array.
POOL_STATES = 1 << 19


@dataclass(frozen=True)
class LatentCase:
    """Sizes of the latent pages that an op works on."""

    latent_dim: int = 512
    rope_dim: int = 64
    page: int = 128
    dtype: str = "bfloat16"  # of the pages
    tokens: int = 512

    def layout(self, page_size: int) -> PageLayout:
        """Of pages of `page_size` states."""
        return latent_layout(
            head_dim=self.latent_dim + self.rope_dim, page_size=page_size, dtype=self.dtype, platform="tpu"
        )

    @property
    def pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The page arrays."""
        return tuple(argument(a.shape(POOL_STATES // self.page), a.dtype) for a in self.layout(self.page).arrays)


@dataclass(frozen=True)
class AttentionCase(LatentCase):
    """Sizes and features of one compilation of mla_paged_attention."""

    heads: int = 16
    q_dtype: str = "bfloat16"
    seqs: int = 64
    context: int = 8192  # tokens of the longest sequence
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    sinks: int = 0
    scales: int = 0
    lse: int = 0
    hbm_tables: int = 0
    ranks: int = 1  # of context parallelism; the longest sequence lies on all of them
    queries: int = 0  # 0: by the shapes; as are the next ones
    units: int = 0
    decode_block: int = 0
    tile_block: int = 0
    decode_part: int = 0
    tile_part: int = 0
    chunk_rows: int = 256
    ahead: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a state in HBM."""
        return self.layout(128).page_bytes // 128


def attention(case: AttentionCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The kernel itself, without the write of new states."""
    q = tuple(argument((case.tokens, case.heads, dim), case.q_dtype) for dim in (case.latent_dim, case.rope_dim))
    columns = -(-case.context // (case.page * case.ranks))
    step = tuple(argument(shape, "int32") for shape in ((case.seqs, columns), (case.seqs,), (case.seqs + 1,), (3,)))
    per_head = (
        argument((case.heads,), "float32") if case.sinks else None,
        argument((), "float32") if case.scales else None,
    )
    rank = argument((), "int32") if case.ranks > 1 else None
    sizes = (case.queries, case.units, case.decode_block, case.tile_block, case.decode_part, case.tile_part)

    def call(q: Any, pages: Any, step: Any, per_head: Any, rank: Any) -> Any:
        return attention_kernel.mla_paged_attention(
            *q,
            pages,
            *step,
            mask=MaskRule(True, case.window or None, case.chunk or None, case.sink_tokens),
            sm_scale=0.1,
            soft_cap=case.soft_cap or None,
            sinks=per_head[0],
            k_scale=per_head[1],
            page_size=case.page,
            return_lse=bool(case.lse),
            share=None if rank is None else KeyShare(rank, case.ranks),
            tuning=attention_kernel.Tuning(*(size or None for size in sizes), case.chunk_rows, case.ahead),
            tables_in_hbm=True if case.hbm_tables else None,
        )

    return call, (q, case.pages, step, per_head, rank)


OPERATIONS = {"mla_attention": (AttentionCase, attention)}


def attention_shapes(num_shards: int) -> list[tuple[str, list[str]]]:
    """Every model whose heads split into so many shards."""
    shapes = [shape for shape in SHAPES if shape.num_q_heads % num_shards == 0]
    sizes = [(f"latent_dim={shape.latent_dim}", f"rope_dim={shape.rope_dim}") for shape in shapes]
    return [
        (shape.name, [*settings, f"heads={shape.per_shard(num_shards)}"])
        for shape, settings in zip(shapes, sizes, strict=True)
    ]


SHAPE_CASES = {"mla_attention": attention_shapes}
