"""The TPU kernels of sparse latent attention against the float64 oracle; NaN wherever unnamed, races watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.latent_entries import LatentFp8
from pallas_kernels.layouts import latent_layout
from pallas_kernels.ragged_paged_attention.oracle import LARGEST_SINK
from pallas_kernels.sparse_mla_attention import kernel_tpu, sparse_mla_attention, tpu_picks
from pallas_kernels.sparse_mla_attention.shapes import SHAPES
from pallas_kernels.tpu.latent_blocks import StateBlocks
from pallas_kernels.tpu.memory import pallas_calls
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Case, Shape, make_case

FP8 = LatentFp8(rope_dim=8, group=8)
FP8_WIDTH = FP8.width(24)
BFLOAT16 = {"latent": LatentShape(24, 16, "bfloat16", "tpu"), "num_columns": 10}
FP8_PAGES = {"entries": FP8, "latent": LatentShape(FP8_WIDTH, 4, "int8", "tpu")}
SINKS = np.array([2.0, -np.inf, 50.0])
STEPS: tuple[Any, ...] = ((0, []), (1, None), (2, [(1, 1), (0, 0), (1, 150), (9, 130), (5, 5)]))

# Window, all entries and picked ones; queries and pages of each kind.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "window": ({"window": 140, "q_dtype": "bfloat16", **BFLOAT16}, True),
    "all": ({"ratio": 1, "entry_page_size": 2, **FP8_PAGES}, False),
    "picks": ({"ratio": 4, "topk": 5, "q_dtype": "bfloat16", "entry_page_size": 8, **FP8_PAGES}, True),
    "picks alone": ({"window": 0, "ratio": 1, "topk": 9, "entry_page_size": 16, **BFLOAT16}, True),
}


def arguments(case: Case, sinks: np.ndarray | None) -> tuple[Any, ...]:
    """Arrays of a case."""
    arrays = {name: np.asarray(x) for name, x in case.compressed.items() if name != "compressed_pages"}
    pages = {"compressed_pages": case.compressed["compressed_pages"]} if case.compressed else {}
    given = arrays | pages | ({} if sinks is None else {"sinks": sinks.astype(np.float32)})
    return jax.tree.map(jnp.asarray, (case.q, (case.page,), case.step, given))


def op_of(shape: Shape, **extra: Any) -> Callable[..., Any]:
    """The op for steps of one shape: (arguments of a case) -> its result."""

    def run(q: Any, pages: Any, step: Any, given: Any) -> Any:
        return sparse_mla_attention(
            q,
            pages,
            *step,
            **given,
            sm_scale=shape.sm_scale,
            sliding_window=shape.window,
            tokens_per_state=shape.ratio,
            entries=shape.entries,
            page_size=shape.latent.page_size,
            compressed_page_size=shape.entry_page_size,
            return_lse=True,
            **extra,
        )

    return run


def compiled(shape: Shape, sinks: np.ndarray | None, **extra: Any) -> Callable[..., Any]:
    """The op on TPU, compiled."""
    return compile_on_tpu(op_of(shape, backend="tpu", **extra), *arguments(make_case(0, shape, []), sinks))


def assert_right(run: Callable[..., Any], case: Case, sinks: np.ndarray | None) -> None:
    result = run(*arguments(case, sinks))
    out, lse = case.expected(sinks)
    assert_close(result.out, out, case.shape.q_dtype, "out")
    assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == case.q.dtype


@pytest.mark.parametrize("name", CASES)
def test_random_steps(name: str) -> None:
    """Lengths 0 and 1 among them, tables in random order, tiles of several sequences, holes among the indices."""
    change, has_sinks = CASES[name]
    shape, sinks = Shape(num_tokens=18, **change), SINKS if has_sinks else None
    run = compiled(shape, sinks)
    for seed, rows in STEPS:
        assert_right(run, make_case(seed, shape, rows), sinks)


@pytest.mark.parametrize("kind", [{"ratio": 4, "topk": 20}, pytest.param({"ratio": 1}, marks=pytest.mark.sweep)])
def test_sinks_of_any_size(kind: dict[str, Any]) -> None:
    """Up to the largest float and beyond, and none: each has the weight that it has in float64, and its LSE."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([-1.0, 1.0], 17) * 10 ** rng.uniform(0, 38.5, 17)
    sinks = np.array([*sizes, 3e38, np.inf, -np.inf], np.float32)
    shape = Shape(num_q_heads=20, entry_page_size=8, **kind, **BFLOAT16)
    case = make_case(3, shape, [(1, 60), (1, 1), (9, 130)])
    result = compiled(shape, sinks)(*arguments(case, sinks))
    expected = case.expected(np.minimum(sinks, LARGEST_SINK).astype(np.float64))
    cases.assert_right(result[:2], expected, shape.q_dtype)


@pytest.mark.parametrize(
    "kind",
    [{"ratio": 4, "topk": 20}, pytest.param({"ratio": 1}, marks=pytest.mark.sweep)],
    ids=["picked entries", "all entries"],
)
def test_states_between_passes_take_few_bytes(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in chunks of eight: sequences over their borders, decode rows in one of them, chunks without tokens."""
    monkeypatch.setattr(kernel_tpu, "LARGEST_STATE_BYTES", 1)
    jax.clear_caches()
    shape = Shape(num_tokens=34, num_rows=4, entry_page_size=8, **kind, **BFLOAT16)
    run = compiled(shape, None)
    for rows in ([(1, 40), (1, 3), (14, 90), (18, 18)], [(1, 9), (4, 60)], []):
        assert_right(run, make_case(1, shape, rows), None)
    jax.clear_caches()


def test_states_of_many_tokens_are_bounded() -> None:
    """8,192 tokens of 64 heads: 256 MiB between two passes, where all at once would be 1.6 GiB."""
    page = latent_layout(head_dim=512, page_size=64, dtype="bfloat16", platform="tpu").arrays[0].shape(64)
    sizes = ((8192, 64, 512), page, page)
    q, pages, entries = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)
    ints = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((8, 64), (8,), (9,), (3,), (8, 32))]

    def call(q: Any, pages: Any, entries: Any, *ints: Any) -> Any:
        given = {"compressed_pages": (entries,), "compressed_tables": ints[4], "tokens_per_state": 4}
        sizes = {"page_size": 64, "compressed_page_size": 64, "sliding_window": 128, "sm_scale": 0.1}
        return sparse_mla_attention(q, (pages,), *ints[:4], **given, **sizes, backend="tpu")

    kernels = pallas_calls(jax.make_jaxpr(call)(q, pages, entries, *ints).jaxpr)
    states = [v.aval for kernel in kernels for v in kernel.outvars if v.aval.dtype == jnp.float32]
    assert states
    assert 4 * sum(math.prod(x.shape) for x in states) <= 2 * kernel_tpu.LARGEST_STATE_BYTES


def test_more_picks_than_a_part() -> None:
    """DMAs of a whole part are started while another is attended."""
    shape = Shape(num_tokens=2, num_rows=2, ratio=1, topk=140, entry_page_size=8, **BFLOAT16)
    assert_right(compiled(shape, None), make_case(0, shape, [(1, 160), (1, 155)]), None)


@pytest.mark.sweep
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_model_shape(ratio: int) -> None:
    """One shard of eight of DeepSeek V4 Flash: bfloat16 queries over fp8 entries, for each kind of layer."""
    model = SHAPES[0]
    entries = LatentFp8(model.rope_dim)
    shape = Shape(
        num_tokens=9,
        num_rows=2,
        num_columns=8,
        num_q_heads=model.per_shard(8),
        dim=model.dim,
        q_dtype="bfloat16",
        window=model.sliding_window,
        ratio=ratio or None,
        topk=model.topk if ratio == 4 else None,
        entries=entries,
        latent=LatentShape(entries.width(model.dim), 64, "int8", "tpu"),
        entry_page_size=256 // (ratio or 256),
    )
    sinks = np.full(shape.num_q_heads, 0.5)
    assert_right(compiled(shape, sinks), make_case(0, shape, [(1, 400), (8, 170)]), sinks)


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("moves", [StateBlocks, tpu_picks._Step], ids=["runs", "picks"])
def test_a_planted_race_is_found(moves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block's pages, or the next token's entries, loaded into the buffer in use: a race is reported."""
    is_run = moves is StateBlocks
    target = moves._target
    monkeypatch.setattr(moves, "_target", lambda self, i, slot: target(self, i, 1 - slot))
    jax.clear_caches()
    change = {"window": 300, "num_columns": 20} if is_run else {"ratio": 4, "topk": 5, "entry_page_size": 8}
    shape = Shape(num_tokens=2, num_rows=2, **(BFLOAT16 | change))
    run = compiled(shape, None)
    case = make_case(9, shape, [(1, 290), (1, 200)] if is_run else [(1, 150), (1, 130)])
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*arguments(case, None))
    jax.clear_caches()


def test_the_op_writes_new_latents_and_attends() -> None:
    """backend="tpu" writes what the reference writes, before it attends."""
    shape = Shape(num_tokens=6, num_rows=1, num_columns=2, **FP8_PAGES)
    case = make_case(4, shape, [(6, 6)])
    new = jnp.asarray(random_values(np.random.default_rng(0), (6, 24), "float32"))
    slots = jnp.asarray(case.step[0][0, np.arange(6) // 4] * 4 + np.arange(6) % 4)
    given = {"new_kv": new, "slot_mapping": slots}
    options = {"sm_scale": shape.sm_scale, "sliding_window": 5, "entries": FP8, "page_size": 4}
    q, pages, step, _ = arguments(case, None)
    expected = sparse_mla_attention(q, pages, *step, **given, **options, backend="reference")

    def run(q: Any, pages: Any, step: Any, given: Any) -> Any:
        return sparse_mla_attention(q, pages, *step, **given, **options, backend="tpu")

    result = compile_on_tpu(run, q, pages, step, given)(q, pages, step, given)
    np.testing.assert_array_equal(result.pages[0], expected.pages[0])
    assert_close(result.out, np.asarray(expected.out, np.float64), "float32", "out")
    assert result.lse is None


PICKS = {"ratio": 4, "topk": 5, "entry_page_size": 8}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"latent": LatentShape(24, 4)}, "TPU kernels read packed latent pages"),
    "dtype": ({"latent": LatentShape(24, 16, "int8", "tpu")}, "plain entries in bfloat16 or float32, got int8"),
    "page": ({"latent": LatentShape(24, 6, "float32", "tpu")}, "page sizes that are powers of two, got 6"),
    "large page": ({"latent": LatentShape(24, 1024, "float32", "tpu")}, "up to 512 states in a page, got 1024"),
    "ratio": ({**FP8_PAGES, **PICKS, "ratio": 3}, "tokens_per_state that are powers of two, got 3"),
    "entries": ({**FP8_PAGES, **PICKS, "entry_page_size": 3}, "page sizes that are powers of two, got 3"),
    "picks": ({**FP8_PAGES, **PICKS, "topk": 30000}, "up to 24576 picked entries, got 30000"),
    "heads": ({**FP8_PAGES, "num_q_heads": 129}, "up to 128 query heads, got 129"),
    "tokens": ({**FP8_PAGES, "num_tokens": 20000}, "up to 16384 tokens, got 20000"),
    "columns": ({**FP8_PAGES, **PICKS, "entry_page_size": 1, "num_columns": 40000}, "columns of compressed_tables"),
    "window": ({**FP8_PAGES, "num_tokens": 9000, "num_columns": 200, "window": 500}, "pages in all windows"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernels_cannot_do(name: str) -> None:
    """backend="tpu" refuses, before anything is computed."""
    change, message = BAD[name]
    shape = Shape(**change)
    columns = shape.entry_columns
    ints = {"step": [(5, shape.num_columns), (5,), (6,), (3,)], "table": [(5, columns)]}
    step = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ints["step"]]
    q = jax.ShapeDtypeStruct((shape.num_tokens, shape.num_q_heads, shape.dim), jnp.float32)
    given: dict[str, Any] = {}
    if shape.ratio is not None:
        given = {"compressed_pages": (_pages(shape.compressed),), "tokens_per_state": shape.ratio}
        given["compressed_tables"] = jax.ShapeDtypeStruct((5, columns), jnp.int32)
        given["topk_indices"] = jax.ShapeDtypeStruct((shape.num_tokens, shape.topk), jnp.int32)
    options = {"sm_scale": 1.0, "sliding_window": shape.window, "entries": shape.entries, "backend": "tpu"}
    sizes = {"page_size": shape.latent.page_size, "compressed_page_size": shape.entry_page_size}
    ratio = given.pop("tokens_per_state", None)
    with pytest.raises(NotImplementedError, match=f"sparse_mla_attention: .*{message}"):
        jax.eval_shape(
            lambda q, pages, step, given: sparse_mla_attention(
                q, pages, *step, **given, tokens_per_state=ratio, **options, **sizes
            ),
            q, (_pages(shape.latent),), step, given,
        )  # fmt: skip


def _pages(latent: LatentShape) -> jax.ShapeDtypeStruct:
    """Three pages."""
    layout = latent_layout(
        head_dim=latent.head_dim, page_size=latent.page_size, dtype=latent.dtype, platform=latent.platform
    )
    return jax.ShapeDtypeStruct(layout.arrays[0].shape(3), jnp.dtype(latent.dtype))


def test_auto_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a TPU, what the kernels cannot do runs as the reference."""
    case = make_case(5, Shape(), [(1, 30), (1, 1), (11, 40)])
    q, pages, step, _ = arguments(case, None)
    options = {"sm_scale": 1.0, "sliding_window": 5}
    expected = sparse_mla_attention(q, pages, *step, **options, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="TPU kernels read packed latent pages.*the reference runs instead"):
        result = sparse_mla_attention(q, pages, *step, **options)
    np.testing.assert_array_equal(result.out, expected.out)
