"""Cases of mla_paged_attention: decode, prefill and both mixed over latents, at the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.compare import assert_heads_close
from pallas_kernels.cases.latents import LatentShape, unpacked
from pallas_kernels.cases.limits import SMALL_PROGRAMS, SMALL_TRIPS
from pallas_kernels.cases.masked_case import MaskedCase
from pallas_kernels.cases.masks import random_mask, random_share
from pallas_kernels.cases.numbers import one_of, random_array
from pallas_kernels.cases.pages import random_pages, random_platform
from pallas_kernels.cases.steps import hard_rows
from pallas_kernels.layouts import PageLayout
from pallas_kernels.mla_paged_attention import kernel_gpu, kernel_tpu, mla_paged_attention, xla_attention
from pallas_kernels.mla_paged_attention.hard_steps import Shape, make_case
from pallas_kernels.mla_paged_attention.shapes import SHAPES
from pallas_kernels.mla_paged_attention.shapes import LatentShape as ModelShape
from pallas_kernels.ragged_paged_attention.oracle import Options, attention

_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


@dataclass(frozen=True)
class LatentCase(MaskedCase):
    """One call of mla_paged_attention, without the write of new latents."""

    heads: int = 16
    latent_dim: int = 512
    rope_dim: int = 64
    sm_scale: float = 0.1
    scales: int = 0
    queries: int = 0  # of the kernel for TPU
    units: int = 0
    decode_block: int = 0
    tile_block: int = 0
    decode_part: int = 0
    tile_part: int = 0
    chunk_rows: int = 0
    ahead: int = 0
    decode_buffers: int = 0
    tile_buffers: int = 0
    stages: int = 0  # of the kernel for GPU
    num_blocks: int = 0

    op = "mla_paged_attention"
    shapes = SHAPES
    kinds = ("decode", "decode-long", "prefill", "mixed")
    backends = ("reference", "xla", "tpu", "gpu", "triton")
    scored = "mla_.*"
    defaults = {  # noqa: RUF012
        "gpu": {"heads": 128, "page": 64, "tokens": 256, "context": 4096, "sinks": 1, "scales": 1, "lse": 1}
    }
    allowed_spills = {  # noqa: RUF012
        ("", ""): 120,
        ("window=", ""): 160,
        ("dtype=float8", ""): 1300,
        ("dtype=int8", ""): 1296,
    }
    features = (
        "page=16 window=1024 soft_cap=30",
        "dtype=float8_e4m3fn",
        "dtype=int8 model=deepseek-v3 shards=8",
        "q_dtype=float16 dtype=float16 model=deepseek-v3 shards=8",
    )

    @classmethod
    def of_shape(cls, shape: ModelShape, num_shards: int) -> Sizes:
        """Query heads of a shard; every shard has all latents."""
        dims = {"latent_dim": shape.latent_dim, "rope_dim": shape.rope_dim}
        return {"heads": shape.per_shard(num_shards), "sm_scale": shape.sm_scale, **dims}

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> LatentCase:
        """Of any mask and options; kernels in small sizes, so that steps have several blocks."""
        is_gpu, is_tpu = backend == "gpu", backend == "tpu"
        page = one_of(rng, [8, 16, 64, 128] if is_gpu or is_tpu else [3, 4, 16, 64])
        dtype = one_of(rng, [*_DTYPES, "float8_e5m2" if is_gpu else "float32"])
        latent_dim, rope_dim = one_of(rng, [(64, 64), (192, 64)] if is_gpu else [(16, 8), (128, 64), (192, 64)])
        if is_gpu:
            latent_dim = one_of(rng, [128, 256])
        rank, ranks = random_share(rng, backend) if page % 4 == 0 else (0, 1)
        sizes: Sizes = {"stages": 2, "num_blocks": 3} if is_gpu else {}
        if is_tpu:
            sizes = {"queries": 8, "units": one_of(rng, [1, 2, 4]), "decode_block": one_of(rng, [128, 256])}
            sizes |= {"tile_block": 128, "decode_part": 128, "tile_part": 128, "chunk_rows": one_of(rng, [16, 256])}
            sizes |= {"hbm_tables": int(rng.random() < 0.3)}
            sizes |= {"decode_buffers": one_of(rng, [0, 2]), "tile_buffers": one_of(rng, [0, 4])}
        if backend in ("xla", "triton"):
            sizes = {"small_trips": int(rng.integers(2))}
        return cls(
            platform=random_platform(rng, backend),
            tokens=one_of(rng, [1, 2, 7, 9, 24, 33]),
            seqs=int(rng.integers(1, 6)),
            context=one_of(rng, [130, 300]),
            heads=one_of(rng, [1, 3, 5, 16, 24]),
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            page=page,
            dtype=dtype,
            q_dtype="bfloat16" if is_gpu else one_of(rng, ["bfloat16", "float32"]),
            sm_scale=0.002 if dtype == "int8" else 0.3,
            soft_cap=one_of(rng, [0.0, 0.0, 1.5, 30.0]),
            sinks=int(ranks == 1 and rng.random() < 0.4),
            scales=int(rng.integers(2)),
            lse=1,
            ranks=ranks,
            rank=rank,
            shared_columns=int(rng.integers(0, 3)),
            **random_mask(rng, page),
            **sizes,
        )

    @property
    def latent(self) -> LatentShape:
        """Of the pages of one rank."""
        return LatentShape(self.latent_dim + self.rope_dim, self.page, self.dtype, self.platform)

    @property
    def token_bytes(self) -> int:
        """Bytes of a state in HBM."""
        layout: PageLayout = self.latent.layout
        return layout.page_bytes // self.page

    @property
    def work(self) -> Work:
        """Each latent seen once, as key and value; queries and outputs."""
        key, value, step = self.latent_dim + self.rope_dim, self.latent_dim, self.step
        num_bytes = step.tokens_seen * key * itemsize(self.dtype)
        num_bytes += step.num_tokens * self.heads * (key + value) * itemsize(self.q_dtype)
        return Work(num_bytes, 2 * step.pairs_seen * self.heads * (key + value))

    def arguments(self, seed: int) -> Arguments:
        """Random pages in random order; rest: both parts of q, step, sinks and scale by name, rank."""
        rng, step = np.random.default_rng(seed), self.step
        pages = random_pages(rng, self.latent.layout, self.num_pages(self.latent.layout, step.num_pages - 1))
        dims = (self.latent_dim, self.rope_dim)
        q = tuple(random_array(rng, (step.num_tokens, self.heads, dim), self.q_dtype) for dim in dims)
        given = {"sinks": random_array(rng, (self.heads,), "float32")} if self.sinks else {}
        given |= {"k_scale": jnp.float32(1.5)} if self.scales else {}
        return Arguments(pages, (q, step.arrays(rng), given, self.given_rank))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences that end beside the ends of pages and tiles, some with fewer tokens than queries."""
        column = self.page * self.ranks
        rows = hard_rows(rng, self.tokens, self.seqs, self.page, self.context // column * column, True)
        latent = LatentShape(self.latent.head_dim, column, self.dtype, self.platform)
        shape = Shape(
            self.tokens, self.seqs, -(-self.context // column), self.heads, self.rope_dim, self.q_dtype, latent
        )
        shared = min(self.shared_columns, shape.num_columns)
        options = Options(self.sm_scale, **self.oracle_options())
        made = make_case(int(rng.integers(1 << 30)), shape, rows, options, shared)
        q_nope, q_pe, pages, *step = (made.of_rank(self.rank, self.ranks) if self.ranks > 1 else made).arrays
        given = self.hard_sinks(rng)
        if self.scales:
            given["k_scale"] = jnp.float32(rng.uniform(0.3, 1.7))
        return Arguments(pages, ((q_nope, q_pe), tuple(step), given, self.given_rank))

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """(out, LSE or None): the op, or a kernel alone in sizes of its own."""
        q, step, given, rank = rest
        arrays: tuple[Any, ...] = (*q, pages, *step)
        options: dict[str, Any] = {"sm_scale": self.sm_scale, "page_size": self.page}
        of_kernel = options | {"soft_cap": self.soft_cap or None, "mask": self.mask, "sinks": None, "k_scale": None}
        of_kernel |= given
        sizes = self.sizes_of(kernel_tpu.Tuning)
        if backend == "tpu" and (sizes or self.hbm_tables):
            of_kernel |= {"return_lse": bool(self.lse), "tuning": kernel_tpu.Tuning(**sizes)}
            of_kernel |= {"share": self.share_of(rank), "tables_in_hbm": True if self.hbm_tables else None}
            return Results(tuple(kernel_tpu.mla_paged_attention(*arrays, **of_kernel)), ())
        if backend == "gpu" and (self.stages or self.num_blocks):
            tuning = kernel_gpu.Tuning(self.stages or None, self.num_blocks or None)
            return Results(tuple(kernel_gpu.mla_paged_attention(*arrays, **of_kernel, tuning=tuning)), ())
        if backend in ("xla", "triton") and self.small_trips:
            limits = {"limits": SMALL_TRIPS} if backend == "xla" else {"by_triton": SMALL_PROGRAMS}
            of_kernel |= {"share": self.share_of(rank), **limits}
            return Results(tuple(xla_attention.mla_paged_attention(*arrays, **of_kernel)), ())
        options |= self.op_options(rank) | given
        result = mla_paged_attention(*arrays, **options, backend=backend)
        return Results((result.out, result.lse), ())

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle of attention: one KV head whose values are the first numbers of its keys."""
        (q_nope, q_pe), step, given, _ = arguments.rest
        q = np.concatenate([np.asarray(q_nope), np.asarray(q_pe)], axis=-1)
        k = self.of_all_ranks(unpacked(np.asarray(arguments.pages[0]), self.latent))[:, :, None]
        tables, lengths, starts, distribution = map(np.asarray, step)
        named = {name: np.asarray(x) for name, x in given.items()}
        if self.scales:  # keys and values are one
            named["v_scale"] = named["k_scale"]
        steps = (tables, lengths, starts, int(distribution[2]))
        options = Options(self.sm_scale, **self.oracle_options(**named))
        return Results(attention(q, k, k[..., : self.latent_dim], *steps, options), ())

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Head by head: a huge sink of one would hide what is wrong in others."""
        assert_heads_close(found.outs, self.expected(arguments).outs)


CASES = (LatentCase,)
