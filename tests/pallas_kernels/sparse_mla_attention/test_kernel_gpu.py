"""The GPU kernel of sparse latent attention against the float64 oracle: NaN wherever unnamed, races, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu, gpu_device
from pallas_kernels.latent_entries import LatentFp8
from pallas_kernels.sparse_mla_attention import kernel_gpu, plan, plan_work, sparse_mla_attention
from pallas_kernels.sparse_mla_attention.gpu_plan import BLOCK, Field
from pallas_kernels.sparse_mla_attention.gpu_rows import RowBlocks
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Case, Shape, make_case

SPLIT, WHOLE = kernel_gpu.Tuning(num_blocks=12), kernel_gpu.Tuning(num_blocks=1)
SHAPE = Shape(
    num_tokens=8,
    num_rows=4,
    num_columns=16,
    num_q_heads=6,
    dim=128,
    q_dtype="bfloat16",
    window=70,
    latent=LatentShape(128, 16, "bfloat16"),
)
ROWS = [(1, 5), (0, 0), (1, 240), (4, 90)]  # padding, a sequence of length 0, lists of several blocks
FP8: dict[str, Any] = {
    "entries": LatentFp8(64, 64),
    "latent": LatentShape(LatentFp8(64, 64).width(128), 16, "int8"),
    "entry_page_size": 8,
}
CASES: dict[str, tuple[dict[str, Any], bool, kernel_gpu.Tuning]] = {
    "window": ({"num_q_heads": 66, "num_tokens": 3, "num_rows": 3}, True, WHOLE),
    "window in pieces": ({"window": 200, "num_q_heads": 66, "num_tokens": 3, "num_rows": 3}, True, SPLIT),
    "all entries": ({"ratio": 1, "entry_page_size": 4}, False, WHOLE),
    "all entries in pieces": ({"ratio": 2, "window": 5, "dim": 256}, True, SPLIT),
    "picked entries": ({"ratio": 1, "topk": 90, "window": 1, "q_dtype": "float16"}, True, WHOLE),
    "picked entries in pieces": ({"ratio": 1, "topk": 90}, True, SPLIT),
    "picked fp8 entries": ({"ratio": 1, "topk": 90, **FP8}, False, WHOLE),
    "all fp8 entries": ({"ratio": 2, "window": 5, **FP8}, True, SPLIT),
}


def shape_of(change: dict[str, Any]) -> Shape:
    """`SHAPE` with changes, its pages of the queries' dtype and dimension."""
    shape = replace(SHAPE, **change)
    page_size = shape.latent.page_size
    return shape if "latent" in change else replace(shape, latent=LatentShape(shape.dim, page_size, shape.q_dtype))


def arguments(case: Case, sinks: np.ndarray | None) -> tuple[Any, ...]:
    """(q, page, step, the rest by name), NaN in the null pages too."""
    page, given = case.page.copy(), dict(case.compressed)
    page[0] = _nothing(page)
    if given:
        given["compressed_pages"] = (given["compressed_pages"][0].copy(),)
        given["compressed_pages"][0][0] = _nothing(page)
    if sinks is not None:
        given["sinks"] = sinks.astype(np.float32)
    return jax.tree.map(jnp.asarray, (case.q, page, case.step, given))


def _nothing(page: np.ndarray) -> Any:
    """What no kernel may use: NaN, in bytes those of e4m3."""
    return 127 if page.dtype == np.int8 else np.nan


def of_reference(case: Case) -> tuple[Any, ...]:
    """(q, page, step): the reference reads the null page."""
    return jax.tree.map(jnp.asarray, (case.q, case.page, case.step))


def call(q: Any, page: Any, step: Any, given: dict[str, Any], *, shape: Shape, **options: Any) -> Any:
    """The op on arguments of `shape`."""
    return sparse_mla_attention(
        q,
        (page,),
        *step,
        **given,
        sm_scale=shape.sm_scale,
        sliding_window=shape.window,
        tokens_per_state=shape.ratio,
        entries=shape.entries,
        page_size=shape.latent.page_size,
        compressed_page_size=shape.entry_page_size if shape.ratio else None,
        **options,
    )


def compiled(shape: Shape, sinks: np.ndarray | None, tuning: kernel_gpu.Tuning) -> Callable[..., Any]:
    """The kernel for steps of one shape: (arguments of a case) -> (out, lse)."""

    def run(q: Any, page: Any, step: Any, given: dict[str, Any]) -> Any:
        sizes = {"sliding_window": shape.window, "page_size": shape.latent.page_size}
        names = ("compressed_pages", "compressed_tables", "topk_indices", "sinks")
        return kernel_gpu.sparse_mla_attention(
            q,
            (page,),
            plan(*step, num_tokens=shape.num_tokens, **sizes),
            *(given.get(name) for name in names),
            sm_scale=shape.sm_scale,
            tokens_per_state=shape.ratio or 1,
            entries=shape.entries,
            page_size=shape.latent.page_size,
            entry_page_size=shape.entry_page_size,
            tuning=tuning,
        )

    return compile_on_gpu(run, *arguments(make_case(0, shape, []), sinks))


def assert_right(run: Callable[..., Any], case: Case, sinks: np.ndarray | None) -> None:
    result = run(*arguments(case, sinks))
    out, lse = case.expected(sinks)
    assert_close(result[0], out, case.shape.q_dtype, "out")
    assert_close(result[1], lse, "float32", "lse")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    """Tokens whole and in pieces, heads of one tile and of two, holes among what is picked."""
    change, has_sinks, tuning = CASES[name]
    shape = shape_of(change)
    sinks = np.random.default_rng(0).standard_normal(shape.num_q_heads) if has_sinks else None
    if sinks is not None:
        sinks[:2] = -np.inf, 50.0
    run = compiled(shape, sinks, tuning)
    assert_right(run, make_case(1, shape, ROWS[: shape.num_rows]), sinks)


def test_an_empty_step() -> None:
    """Padding alone: 0 and -inf, whole and in pieces."""
    for tuning in (SPLIT, WHOLE):
        assert_right(compiled(SHAPE, None, tuning), make_case(0, SHAPE, []), None)


def test_nan_stays_with_the_tokens_that_see_it() -> None:
    """An entry that the last token alone sees: the tokens before it, whose list it stands in, do as without it."""
    shape = shape_of({"ratio": 1, "num_tokens": 3, "num_rows": 1, "window": 1})
    case = make_case(2, shape, [(3, 70)])
    run = compiled(shape, None, WHOLE)
    clean = run(*arguments(case, None))
    q, page, step, given = arguments(case, None)
    number, offset = divmod(69, shape.entry_page_size)
    entries = given["compressed_pages"][0].at[case.compressed["compressed_tables"][0, number], offset].set(np.nan)
    out, lse = run(q, page, step, given | {"compressed_pages": (entries,)})
    np.testing.assert_array_equal(out[:2].astype(np.float32), clean[0][:2].astype(np.float32))
    np.testing.assert_array_equal(lse[:2], clean[1][:2])
    assert np.isnan(out[2].astype(np.float32)).all()
    assert np.isnan(lse[2]).all()


@pytest.mark.skipif(gpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("wait", ["wait_full", "wait_idle", "wait_moved", "wait_weighed"])
def test_a_missing_wait_is_found(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not wait for a barrier: the interpreter reports a race, or a barrier that nobody observed."""
    monkeypatch.setattr(RowBlocks, wait, lambda *_: None)
    shape = shape_of({"num_tokens": 2, "num_rows": 2, "window": 200})
    run = compiled(shape, None, WHOLE)
    with pytest.raises(Exception, match=r"race|observed|phase"):
        run(*arguments(make_case(9, shape, [(1, 240), (1, 210)]), None))


def slots(table: np.ndarray, page_size: int, states: np.ndarray) -> list[int]:
    """Of states of one sequence."""
    return (table[states // page_size] * page_size + states % page_size).tolist()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["window", "all", "picks"])
@pytest.mark.parametrize("num_blocks", [1, 7, 40])
def test_pieces_have_every_row_once(parts: int, kind: str, num_blocks: int) -> None:
    """What the pieces of a tile go through is the window of its token, then the entries that it sees."""
    ratio = {"window": None, "all": 2, "picks": 2}[kind]
    shape = replace(SHAPE, window=100, ratio=ratio, topk=70 if kind == "picks" else None)
    case = make_case(5, shape, ROWS)
    schedule = plan(*case.step, num_tokens=8, sliding_window=100, page_size=16)
    tables, indices = case.compressed.get("compressed_tables"), case.compressed.get("topk_indices")
    q = jax.ShapeDtypeStruct((8, 64 * parts, 128), jnp.bfloat16)
    num_picks = None if indices is None else indices.shape[1]
    of_tables = None if tables is None else jnp.asarray(tables)
    sizes = {"num_picks": num_picks, "tokens_per_state": ratio or 1, "entry_page_size": shape.entry_page_size}
    tuning = kernel_gpu.Tuning(num_blocks)
    work = kernel_gpu.plan(schedule, q, of_tables, **sizes, tuning=tuning)
    lists, lengths = work.rows, np.full(8, 1 << 30)
    if indices is not None and of_tables is not None:
        picked = work.picked_slots(of_tables, indices)
        lists, lengths = picked.reshape(-1), work.num_picked(jnp.asarray(indices))
    schedule, work, lists = jax.tree.map(np.asarray, (schedule, work, lists))
    found: dict[int, list[int]] = {tile: [] for tile in range(8 * parts)}
    for first, end in work.blocks:
        for piece in work.pieces[first:end]:
            for block in range(piece[Field.FIRST], piece[Field.END]):
                number = block - piece[Field.WINDOW_BLOCKS]
                start, count = piece[Field.WINDOW] + block * BLOCK, BLOCK
                if number * BLOCK >= lengths[piece[Field.TILE] // parts]:
                    continue
                if number >= 0:
                    start, count = piece[Field.ENTRIES] + number * BLOCK, piece[Field.NUM_ENTRIES] - number * BLOCK
                rows = (work.rows if number < 0 else lists)[start : start + BLOCK][: max(count, 0)]
                found[int(piece[Field.TILE])] += rows[rows >= 0].tolist()
    for tile, rows in found.items():
        token = tile // parts
        seq, pos = int(schedule.seq[token]), int(schedule.pos[token])
        own = np.arange(max(0, pos - 99), pos + 1)
        expected = slots(case.step[0][seq], 16, own)
        if ratio and pos >= 0:
            seen = np.arange((pos + 1) // 2) if indices is None else indices[token]
            seen = seen[(seen >= 0) & (seen < (pos + 1) // 2)]
            expected += slots(tables[seq], shape.entry_page_size, seen)
        assert rows == expected, tile


def test_work_of_a_step_is_that_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned once and handed to a layer that picks entries: what the oracle says."""
    monkeypatch.setattr(mosaic, "num_sms", lambda: 1)
    shape = shape_of({"ratio": 1, "topk": 9, "window": 9, "num_tokens": 2, "num_rows": 2, "num_q_heads": 2})
    case = make_case(6, shape, [(1, 5), (1, 40)])

    def run(q: Any, page: Any, step: Any, given: dict[str, Any]) -> Any:
        schedule = plan(*step, num_tokens=2, sliding_window=9, page_size=16)
        of_entries = {name: x for name, x in given.items() if name.startswith("compressed")}
        of_entries |= {"compressed_page_size": shape.entry_page_size, "tokens_per_state": 1, "num_picks": 9}
        work = plan_work(q, (page,), schedule, **of_entries, backend="gpu")
        return call(q, page, step, given, shape=shape, schedule=schedule, work=work, backend="gpu").out

    inputs = arguments(case, None)
    assert_close(compile_on_gpu(run, *inputs)(*inputs), case.expected(None)[0], "bfloat16", "out")


def test_work_of_another_kind_is_refused() -> None:
    """What was planned for windows alone is no work of layers that see entries; nor is a schedule work."""
    shape = shape_of({"ratio": 1})
    q, page, step, given = arguments(make_case(7, shape, ROWS), None)
    schedule = plan(*step, num_tokens=8, sliding_window=shape.window, page_size=16)
    work = plan_work(q, (page,), schedule, backend="gpu")
    run = functools.partial(call, q, page, step, given, shape=shape, schedule=schedule, backend="gpu")
    with pytest.raises(ValueError, match=r"expected work planned for .*; plan it again with this call's shapes"):
        run(work=work)
    with pytest.raises(ValueError, match=r"expected work to be what plan_work\(\) returns, got SparseSchedule"):
        run(work=schedule)
    assert plan_work(q, (page,), schedule, backend="reference") is None


def test_the_op_writes_new_latents_and_attends() -> None:
    """backend="gpu": every token sees what the step itself writes; the pages are the reference's."""
    shape = replace(SHAPE, num_tokens=6, num_rows=1, num_columns=2)
    case = make_case(4, shape, [(6, 6)])
    new = jnp.asarray(np.random.default_rng(0).standard_normal((6, 128)), jnp.bfloat16)
    slots = jnp.asarray(case.step[0][0, 0] * 16 + np.arange(6), jnp.int32)
    q, page, step = of_reference(case)
    given = {"new_kv": new, "slot_mapping": slots}
    run = functools.partial(call, shape=shape)
    expected = run(q, page, step, given, backend="reference")
    result = compile_on_gpu(functools.partial(run, backend="gpu"), q, page, step, given)(q, page, step, given)
    np.testing.assert_array_equal(result.pages[0].view(np.uint16), np.asarray(expected.pages[0]).view(np.uint16))
    assert_close(result.out, np.asarray(expected.out, np.float64), "bfloat16", "out")
    assert result.lse is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"latent": LatentShape(128, 16, "bfloat16", "tpu")}, "GPU kernels read latent pages"),
    "float32": ({"q_dtype": "float32"}, "take bfloat16 or float16 queries, got float32"),
    "mixed": ({"latent": LatentShape(128, 16, "float16")}, "take pages of bfloat16 as the queries, got float16"),
    "entries": ({**FP8, "q_dtype": "float16"}, "take bfloat16 queries over entries in fp8, got float16"),
    "groups": (
        {**FP8, "entries": LatentFp8(64, 32), "latent": LatentShape(LatentFp8(64, 32).width(128), 16, "int8")},
        "take entries with a scale for 64 numbers and 64 or 128 rotary ones, got LatentFp8",
    ),
    "odd bytes": (
        {**FP8, "latent": LatentShape(LatentFp8(64, 64).width(128), 1, "int8")},
        "take pages of a multiple of 16 bytes with entries in fp8, got 194",
    ),
    "dim": ({"dim": 192}, "up to 512 numbers in steps of 128, got 192"),
    "large": ({"dim": 640}, "up to 512 numbers in steps of 128, got 640"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" refuses; "auto" on a GPU warns once and gives what vectorised XLA gives."""
    change, message = BAD[name]
    shape = shape_of(change)
    q, page, step = of_reference(make_case(12, shape, [(3, 9)]))
    run = functools.partial(call, q, page, step, {}, shape=shape)
    with pytest.raises(NotImplementedError, match=f"sparse_mla_attention: .*{message}"):
        run(backend="gpu")
    expected = run(backend="xla")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match="vectorised XLA runs instead"):
        result = run()
    np.testing.assert_array_equal(np.asarray(result.out), np.asarray(expected.out))
    run()  # no second warning
