"""Cases of ragged_paged_attention: decode, prefill and both mixed, at the shapes of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results, Sizes, Work, itemsize
from pallas_kernels.cases.compare import assert_heads_close, assert_same
from pallas_kernels.cases.kv_case import one_head_in_fp8_too
from pallas_kernels.cases.limits import SMALL_PROGRAMS, SMALL_TRIPS
from pallas_kernels.cases.masked_case import MaskedCase
from pallas_kernels.cases.masks import random_mask, random_share
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.pages import random_pages, random_platform, whole_rows
from pallas_kernels.cases.steps import hard_rows, on_device
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write import oracle as write_oracle
from pallas_kernels.layouts import PageLayout
from pallas_kernels.ragged_paged_attention import kernel_gpu, kernel_tpu, ragged_paged_attention, xla_attention
from pallas_kernels.ragged_paged_attention.hard_steps import Shape, make_case
from pallas_kernels.ragged_paged_attention.oracle import Options, attention, unpacked
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape

_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
_HEADS = ((1, 1), (1, 2), (2, 2), (3, 1), (4, 2), (5, 1), (8, 1), (9, 3), (16, 1), (2, 4))  # (queries a KV head, those)


@dataclass(frozen=True)
class AttentionCase(MaskedCase):
    """One call of ragged_paged_attention."""

    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    sm_scale: float = 0.0  # 0: by the dimension
    scales: str = ""  # "one" or "heads": a scale, or one for each KV head
    write: int = 0  # new K and V of the queries' tokens are written first
    tuned: int = 1  # sizes of the chip's tuned file, where it has the shape
    decode_block: int = 0  # of the kernels
    queries: int = 0  # of the kernel for TPU
    tile_block: int = 0
    max_unrolled: int = 0
    decode_buffers: int = 0
    tile_buffers: int = 0
    decode_stages: int = 0  # of the kernel for GPU
    num_blocks: int = 0
    prefill_block: int = 0
    prefill_stages: int = 0
    prefill_warpgroups: int = 0
    prefill_blocks: int = 0

    op = "ragged_paged_attention"
    shapes = SHAPES
    kinds = ("decode", "decode-long", "decode-32k", "prefill", "mixed")
    backends = ("reference", "xla", "tpu", "gpu", "triton")
    scored = "rpa_.*"
    defaults = {  # noqa: RUF012
        "gpu": {"tokens": 2048, "context": 4096, "sinks": 1, "scales": "heads", "lse": 1, "write": 1}
    }
    # 64 x 256 sums and 64 x 64 scores a warpgroup take all registers that there are.
    allowed_spills = {  # noqa: RUF012
        ("dtype=int8 soft_cap", "rpa_decode_"): 16,
        ("dtype=int8 soft_cap", "rpa_prefill_"): 8,
        ("head_dim=256 dtype=float8", "rpa_decode_"): 216,
        ("head_dim=256 dtype=float8", "rpa_prefill_"): 76,
    }
    features = (
        "page=8",
        "page=64",
        "page=128",
        "page=64 dtype=float8_e4m3fn",
        "dtype=int8 soft_cap=30",
        "dtype=float16 q_dtype=float16 sink_tokens=4 window=1024",
        "head_dim=64 dtype=float8_e5m2",
        "head_dim=192 head_dim_v=128",
        "head_dim=192",
        "head_dim=256",
        "head_dim=256 dtype=float8_e4m3fn",
        *(f"tokens=256 {sizes}" for sizes in ("", "head_dim=64", "head_dim=256", "dtype=float8_e4m3fn", "window=128")),
    )
    in_subset = ("model=llama3-8b shards=8", "model=gpt-oss-120b-local page=64", "page=64 dtype=float8_e4m3fn")
    tpu_features = (
        "window=1024",
        "chunk=2048",
        "window=1024 sink_tokens=4",
        "window=1024 own_sinks=2048",
        "sinks=1",
        "scales=heads",
        "lse=1",
        "hbm_tables=1",
        "write=1",
        "window=1024 sink_tokens=4 sinks=1 scales=heads lse=1 hbm_tables=1 write=1",
        "soft_cap=30.0",
        *(f"dtype={dtype}" for dtype in ("float8_e4m3fn", "float8_e5m2", "int8", "float32")),
        *(f"head_dim={dim}" for dim in (64, 80, 96, 192, 256)),
    )

    @classmethod
    def of_shape(cls, shape: AttentionShape, num_shards: int) -> Sizes:
        """Heads of a shard; of the rest what the layer has."""
        heads, kv_heads = shape.per_shard(num_shards)
        rest = {
            "sm_scale": shape.sm_scale if shape.query_scalar else 0.0,
            "window": shape.sliding_window or 0,
            "chunk": shape.attention_chunk_size or 0,
            "soft_cap": shape.soft_cap or 0.0,
            "sinks": int(shape.sinks),
        }
        has = {name: value for name, value in rest.items() if value}
        return {"heads": heads, "kv_heads": kv_heads, "head_dim": shape.head_dim, **has}

    @classmethod
    def kinds_of(cls, shape: AttentionShape) -> tuple[str, ...]:
        """32k tokens where a mask hides most of them."""
        hides = shape.sliding_window is not None or shape.attention_chunk_size is not None
        return tuple(kind for kind in cls.kinds if hides or kind != "decode-32k")

    @classmethod
    def to_compile(cls, shape: AttentionShape, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """One KV head in fp8 too."""
        yield from one_head_in_fp8_too(shape.name, cls.of_shape(shape, num_shards))

    @classmethod
    def random(cls, rng: np.random.Generator, backend: str) -> AttentionCase:
        """Of any mask and options; kernels in small sizes, so that steps have several blocks."""
        is_gpu, is_tpu = backend == "gpu", backend == "tpu"
        platform = "cpu" if backend == "triton" else random_platform(rng, backend)
        group, kv_heads = one_of(rng, _HEADS)
        dtype = one_of(rng, ["bfloat16", *_DTYPES, *([] if is_gpu else ["float32"]), *([] if is_tpu else ["float16"])])
        page = one_of(rng, [8, 16, 32, 64, 128, 256] if is_tpu or is_gpu else [1, 3, 4, 16, 64, 128])
        page = whole_rows(page, kv_heads, dtype, platform)
        rank, ranks = random_share(rng, backend)
        q_dtype = one_of(rng, ["bfloat16", "float32"] if is_tpu else ["bfloat16", "float32", "float16"])
        if is_gpu:
            q_dtype = "float16" if dtype == "float16" else "bfloat16"
        writes = ranks == 1 and rng.random() < 0.25
        dims = [64, 96, 128, 256] if is_gpu else [64, 80, 128, 192, 256]
        head_dim = one_of(rng, dims if is_gpu or is_tpu else [1, 16, *dims])
        return cls(
            platform=platform,
            tokens=one_of(rng, [1, 2, 7, 9, 17, 33, 40]),
            seqs=int(rng.integers(1, 6)),
            context=one_of(rng, [130, 300, 600]),
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=64 if platform == "cpu" and rng.random() < 0.2 else 0,
            page=page,
            dtype=dtype,
            q_dtype=q_dtype,
            sm_scale=0.3 / 64 if dtype == "int8" else 0.3,  # int8 pages hold values 64 times larger
            soft_cap=one_of(rng, [0.0, 0.0, 1.5, 30.0]),
            sinks=int(ranks == 1 and rng.random() < 0.4),
            scales=one_of(rng, ["", "one", "heads"]),
            lse=1,
            write=int(writes),
            ranks=ranks,
            rank=rank,
            shared_columns=0 if writes else int(rng.integers(0, 3)),
            **random_mask(rng, page) | _random_sizes(rng, backend, page) | _own_sinks(rng),
        )

    @property
    def writes(self) -> bool:
        """As it is asked to."""
        return bool(self.write)

    @property
    def layout(self) -> PageLayout:
        """Of the pages of one rank."""
        return self._hard_shape(self.page).layout

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in HBM."""
        return self.layout.page_bytes // self.page

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return self.sm_scale or self.head_dim**-0.5

    @property
    def work(self) -> Work:
        """K and V of each token seen, queries and outputs, new K and V read and written; two products a pair."""
        step, dims = self.step, self.head_dim + (self.head_dim_v or self.head_dim)
        num_bytes = step.tokens_seen * self.kv_heads * dims * itemsize(self.dtype)
        num_bytes += step.num_tokens * self.heads * dims * itemsize(self.q_dtype)
        if self.write:
            num_bytes += step.num_tokens * self.kv_heads * dims * (itemsize(self.q_dtype) + itemsize(self.dtype))
        return Work(num_bytes, 2 * step.pairs_seen * self.heads * dims)

    def arguments(self, seed: int) -> Arguments:
        """Random pages in random order; rest: q, step, the op's other arrays by name, rank."""
        rng, step = np.random.default_rng(seed), self.step
        pages = random_pages(rng, self.layout, self.num_pages(self.layout, step.num_pages - 1))
        q = random_array(rng, (step.num_tokens, self.heads, self.head_dim), self.q_dtype)
        ints = step.ints(rng)
        given: dict[str, Any] = {"sinks": random_array(rng, (self.heads,), "float32")} if self.sinks else {}
        if self.write:
            new = tuple(random_array(rng, shape, self.q_dtype) for shape in self._new_shapes)
            given |= {"new_kv": new, "slot_mapping": step.new_slots(ints[0])}
        return Arguments(pages, (q, on_device(*ints), given | self._random_scales(rng), self.given_rank))

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """Sequences that end beside the ends of pages and tiles, some with fewer tokens than queries."""
        column = self.page * self.ranks
        shape = self._hard_shape(column)
        rows = hard_rows(rng, self.tokens, self.seqs, self.page, shape.num_columns * column, True)
        shared = min(self.shared_columns, shape.num_columns)
        made = make_case(int(rng.integers(1 << 30)), shape, rows, self._oracle_options(self.seqs), shared)
        q, pages, *step = (made.of_rank(self.rank, self.ranks) if self.ranks > 1 else made).arrays
        given = self.hard_sinks(rng)
        if self.write:
            new = tuple(jnp.asarray(random_values(rng, shape, self.q_dtype)) for shape in self._new_shapes)
            given |= {"new_kv": new, "slot_mapping": self._own_slots(made.block_tables, rows)}
        return Arguments(pages, (q, tuple(step), given | self._random_scales(rng), self.given_rank))

    def _oracle_options(self, num_seqs: int, **arrays: np.ndarray) -> Options:
        """`arrays`: sinks and scales."""
        options = self.oracle_options(**arrays)
        return Options(self.scale, **options | ({"num_sink_tokens": self.sinks_of(num_seqs)} if self.own_sinks else {}))

    def _hard_shape(self, column: int) -> Shape:
        """Of `hard_arguments`, with so many tokens in a column of the tables."""
        return Shape(
            self.tokens,
            self.seqs,
            -(-self.context // column),
            column,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim_v or None,
            self.q_dtype,
            self.dtype,
            self.platform,
        )

    @property
    def _new_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of new K and V."""
        dims = (self.head_dim, self.head_dim_v or self.head_dim)
        return tuple((self.step.num_tokens, self.kv_heads, dim) for dim in dims)

    def _random_scales(self, rng: np.random.Generator) -> dict[str, Any]:
        """By the op's names; powers of two where new K and V are divided by them."""
        shape = {"": None, "one": (), "heads": (self.kv_heads,)}[self.scales]
        names = () if shape is None else ("k_scale", "v_scale")
        drawn = [2.0 ** rng.integers(-1, 2, shape) if self.write else rng.uniform(0.3, 1.7, shape) for _ in names]
        return {name: jnp.asarray(scale, jnp.float32) for name, scale in zip(names, drawn, strict=True)}

    def _own_slots(self, tables: np.ndarray, rows: list[tuple[int, int]]) -> Any:
        """int32[tokens]: where the queries' tokens lie; -1: in no page that the sequence has."""
        slots = np.full(self.tokens, -1, np.int32)
        positions = [(row, n - q_len + i) for row, (q_len, n) in enumerate(rows) for i in range(q_len)]
        for token, (row, position) in enumerate(positions):
            page = tables[row, position // self.page] if position >= 0 else 0
            slots[token] = page * self.page + position % self.page if page else -1
        return jnp.asarray(slots)

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """(out, LSE or None) and the pages that were written: the op, or a kernel alone in sizes of its own."""
        q, step, given, rank = rest
        kernel = self._kernel(backend, rank)
        if kernel is None:
            arrays: tuple[Any, ...] = (q, pages, *step)
            of_op = {**given, **self.op_options(rank), "sm_scale": self.scale, "num_kv_heads": self.kv_heads}
            if self.own_sinks:
                of_op["num_sink_tokens"] = jnp.array(self.sinks_of(step[1].shape[0]), jnp.int32)
            result = ragged_paged_attention(*arrays, **of_op, backend=backend)
            return Results((result.out, result.lse), result.pages if self.write else ())
        options: dict[str, Any] = {"mask": self.mask, "num_kv_heads": self.kv_heads, "sm_scale": self.scale}
        options |= {"soft_cap": self.soft_cap or None, "sinks": None, "k_scale": None, "v_scale": None} | given
        if self.own_sinks:
            options["sink_tokens"] = jnp.array(self.sinks_of(step[1].shape[0]), jnp.int32)
        if self.write and backend != "tpu":
            new_k, new_v = options.pop("new_kv")
            scales = {name: options[name] for name in ("k_scale", "v_scale")}
            pages = kv_write(new_k, new_v, pages, options.pop("slot_mapping"), **scales, backend=backend)
        out, lse, *written = kernel(q, pages, *step, **options)
        return Results((out, lse), (tuple(written) or pages) if self.write else ())

    def _kernel(self, backend: str, rank: Any) -> Callable[..., Any] | None:
        """What a backend runs in the case's sizes; None: in those that the op chooses."""
        share, lse = self.share_of(rank), bool(self.lse)
        if backend == "tpu" and (self.sizes_of(kernel_tpu.Tuning) or self.hbm_tables or not self.tuned):
            sizes = self.sizes_of(kernel_tpu.Tuning)
            tuning = kernel_tpu.Tuning(**sizes) if sizes or not self.tuned else None
            own = {"share": share, "tuning": tuning, "tables_in_hbm": True if self.hbm_tables else None}
            return partial(kernel_tpu.ragged_paged_attention, return_lse=lse, **own)
        if backend == "gpu" and (self.sizes_of(kernel_gpu.Tuning) or not self.tuned):
            tuning_gpu = kernel_gpu.Tuning(**self.sizes_of(kernel_gpu.Tuning))
            return partial(kernel_gpu.ragged_paged_attention, return_lse=lse, tuning=tuning_gpu)
        if backend == "xla" and self.small_trips:
            return partial(xla_attention.ragged_paged_attention, share=share, limits=SMALL_TRIPS)
        if backend == "triton" and self.small_trips:
            return partial(xla_attention.ragged_paged_attention, share=share, by_triton=SMALL_PROGRAMS)
        return None

    def expected(self, arguments: Arguments) -> Results:
        """By the oracles of the write and of attention."""
        q, (tables, lengths, starts, distribution), given, _ = arguments.rest
        pages = tuple(map(np.asarray, arguments.pages))
        named = {name: np.asarray(x) for name, x in given.items() if name in ("sinks", "k_scale", "v_scale")}
        if self.write:
            (new_k, new_v), slots = map(np.asarray, given["new_kv"]), np.asarray(given["slot_mapping"])
            scales = (named.get("k_scale"), named.get("v_scale"))
            pages = write_oracle.kv_write((new_k, new_v), pages, slots, self.page, scales)
        k, v = (self.of_all_ranks(own) for own in unpacked(pages, self.kv_heads, self.head_dim))
        tables, lengths, starts = map(np.asarray, (tables, lengths, starts))
        options = self._oracle_options(lengths.size, **named)
        outs = attention(np.asarray(q), k, v, tables, lengths, starts, int(distribution[2]), options)
        return Results(outs, pages if self.write else ())

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Head by head: a huge sink of one would hide what is wrong in others.

        The kernel for TPU rounds weights before it sums them, but those of float32.
        """
        expected = self.expected(arguments)
        rounds = self.platform == "tpu" and "float32" not in (self.q_dtype, self.dtype)
        assert_heads_close(found.outs, expected.outs, "bfloat16 weights" if rounds else "float32")
        assert_same(found.pages, expected.pages)


def _random_sizes(rng: np.random.Generator, backend: str, page: int) -> Sizes:
    """Of kernels, small ones in most draws."""
    if backend == "tpu":
        block = max(128, page)
        small = {"queries": 8, "decode_block": block, "tile_block": block, "max_unrolled": one_of(rng, [1, 8])}
        return one_of(rng, [small, small, {}]) | {"hbm_tables": int(rng.random() < 0.3)}
    if backend == "gpu":
        rings = {"decode_block": 64, "decode_stages": 2, "prefill_block": 64, "prefill_stages": 2}
        return one_of(rng, [{"num_blocks": 5}, rings | {"num_blocks": 3}])
    return {"small_trips": int(rng.integers(2))}


def _own_sinks(rng: np.random.Generator) -> Sizes:
    """Sink tokens of each sequence's own, in some draws."""
    return {"sink_tokens": 0, "own_sinks": one_of(rng, [5, 90, 400])} if rng.random() < 0.2 else {}


CASES = (AttentionCase,)
