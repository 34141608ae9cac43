"""The TPU kernel against the float64 oracle: every feature, ragged steps, NaN wherever unseen, races."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_tpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks
from pallas_kernels.ragged_paged_attention.tpu_tuning import tile_queries, tile_rows
from tests.pallas_kernels.cases import Case, Shape, assert_close, make_case, random_values
from tests.pallas_kernels.cases import run as run_reference

SMALL_BLOCKS = kernel_tpu.Tuning(queries=8, decode_block=128, tile_block=128)


def compiled(shape: Shape, options: Options, tuning: kernel_tpu.Tuning = SMALL_BLOCKS, tables_in_hbm: bool = False):  # type: ignore[no-untyped-def]
    """The kernel for steps of one shape: (arrays of a case) -> (out, lse)."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)
    given = {name: getattr(options, name) for name in ("sinks", "k_scale", "v_scale")}
    call = functools.partial(
        kernel_tpu.ragged_paged_attention,
        mask=mask,
        num_kv_heads=shape.num_kv_heads,
        sm_scale=options.sm_scale,
        soft_cap=options.soft_cap,
        **{name: None if x is None else jnp.asarray(x) for name, x in given.items()},
        return_lse=True,
        tuning=tuning,
        tables_in_hbm=tables_in_hbm,
    )
    return compile_on_tpu(call, *make_case(0, shape, []).arrays)


def assert_right(result: tuple[np.ndarray, ...], case: Case, options: Options) -> None:
    out, lse = case.expected(options)
    exact = "float32" in (case.shape.q_dtype, case.shape.kv_dtype)  # else weights are summed as bfloat16
    assert_close(result[0], out, case.shape.q_dtype, "out")
    assert_close(result[1], lse, "float32" if exact else "bfloat16 weights", "lse")


LONG = Shape(
    num_tokens=40, num_rows=4, num_columns=22, page_size=64, head_dim=128, q_dtype="bfloat16", kv_dtype="bfloat16",
    platform="tpu",
)  # fmt: skip
SHORT = dataclasses.replace(LONG, num_columns=12, page_size=16)
ROWS = [(1, 130), (1, 1), (17, 190), (13, 13)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(), id="full"),
        pytest.param(Options(sliding_window=700), id="window", marks=pytest.mark.sweep),
    ],
)
def test_blocks_of_the_default_size(options: Options) -> None:
    """Several blocks that every row sees whole, more queries than a tile, tiles that end in the middle of a page."""
    run = compiled(LONG, options, kernel_tpu.Tuning())
    for seed, rows in ((1, [(1, 1400), (1, 1408), (38, 1300)]), (2, [(1, 513), (0, 0), (9, 1025), (30, 600)])):
        case = make_case(seed, LONG, rows, options)
        assert_right(run(*case.arrays), case, options)


@pytest.mark.parametrize("num_kv_heads", [1, 8, 16, 64])
def test_tiles_of_larger_steps_have_more_rows(num_kv_heads: int) -> None:
    """Whole powers of two of tokens, no smaller ones for more tokens; state of all heads within 8 MiB or 128 rows."""
    rows = [tile_rows(num_tokens, num_kv_heads) for num_tokens in (1, 256, 257, 2047, 2048, 1 << 16)]
    assert rows == sorted(rows)
    assert rows[0] == rows[1] == 128
    for count in rows:
        assert count == 128 or count * num_kv_heads * 128 * 4 * 4 <= 8 << 20
        for group in (1, 3, 4, 8):
            queries = tile_queries(group, MaskRule(), count)
            assert 8 <= queries <= count // 2
            assert queries & (queries - 1) == 0
            assert queries * group <= max(count, 8 * group)


def test_cross_attention_may_have_more_queries_than_keys() -> None:
    """Without a mask every query sees every key of its sequence, and a sequence without keys gives nothing."""
    options = Options(causal=False)
    run = compiled(SHORT, options)
    for seed, rows in ((1, [(1, 130), (9, 3), (29, 16)]), (2, [(1, 0), (20, 1), (12, 190)])):
        case = make_case(seed, SHORT, rows, options)
        assert_right(run(*case.arrays), case, options)


BLIND = {"cut": [(1, 0), (1, 130), (9, 3), (20, 40)], "none": [(1, 0), (13, 0)], "rest": [(11, 2), (9, 9)]}


@pytest.mark.parametrize(
    "mask",
    [
        {"sliding_window": 20, "num_sink_tokens": 5},
        pytest.param({}, marks=pytest.mark.sweep),
        pytest.param({"causal": False}, marks=pytest.mark.sweep),
        pytest.param({"causal": False, "sliding_window": 9}, marks=pytest.mark.sweep),
    ],
)
def test_queries_before_position_0_see_nothing(mask: dict[str, Any]) -> None:
    """A live sequence of fewer tokens than queries: out 0 and LSE -inf of the first ones, and it stops no other."""
    options = Options(**mask, sinks=np.full(4, 2.0, np.float32))
    run = compiled(SHORT, options)
    for rows in BLIND.values():
        case = make_case(1, SHORT, rows, options)
        assert_right(run(*case.arrays), case, options)


@pytest.mark.skipif(tpu_device() is not None, reason="the interpreter tells the steps of a grid")
def test_every_launch_has_a_step_and_no_launch_is_empty() -> None:
    """Chips run no grid of 0; and a step that only decodes launches no tiles."""
    launched: list[tuple[int, ...]] = []

    def record(*given: Any) -> Any:
        """Of (grid point, core), with jax 0.12 after a token that goes on."""
        launched.append(tuple(int(i) for i in given[-2]))
        return given[0] if len(given) == 3 else None

    params = pltpu.InterpretParams(grid_point_recorder=record)
    with pltpu.force_tpu_interpret_mode(params):
        run = jax.jit(functools.partial(kernel_tpu.ragged_paged_attention, **PLAIN))
        for rows, steps in (([], 1), ([(1, 130), (1, 1)], 1), ([(17, 190)], 1 + 1), ([(1, 5), (8, 8)], 1 + 1)):
            case = make_case(1, SHORT, rows)
            launched.clear()
            assert_right(run(*case.arrays), case, Options())
            assert len(launched) == steps, rows
    jax.clear_caches()


PLAIN = {
    "mask": MaskRule(), "num_kv_heads": 2, "sm_scale": 0.125, "soft_cap": None, "sinks": None, "k_scale": None,
    "v_scale": None, "return_lse": True, "tuning": SMALL_BLOCKS,
}  # fmt: skip


ONE = dataclasses.replace(SHORT, num_tokens=1)


@pytest.fixture(scope="module")
def run_one():  # type: ignore[no-untyped-def]
    return compiled(ONE, Options())


@pytest.mark.parametrize("called", ["decode", "mixed"])
def test_a_step_of_one_token_may_be_called_anything(called: str, run_one) -> None:  # type: ignore[no-untyped-def]
    """One token in one sequence gives the same, whatever part of the distribution its row is in."""
    case = make_case(3, ONE, [(1, 130)])
    case.distribution[:] = (1, 1, 1) if called == "decode" else (0, 0, 1)
    assert_right(run_one(*case.arrays), case, Options())


@pytest.fixture(scope="module")
def run_short():  # type: ignore[no-untyped-def]
    """The kernel for steps of SHORT with a window and sink tokens."""
    return compiled(SHORT, WINDOW)


WINDOW = Options(sliding_window=50, num_sink_tokens=3)


def test_order_of_pages_does_not_matter(run_short) -> None:  # type: ignore[no-untyped-def]
    """Pages in another order under a table that names them so: equal bits."""
    case = make_case(1, SHORT, ROWS, WINDOW)
    order = np.concatenate([[0], 1 + np.random.default_rng(2).permutation(case.pages[0].shape[0] - 1)])
    where = np.argsort(order).astype(np.int32)
    moved = dataclasses.replace(case, pages=tuple(p[order] for p in case.pages), block_tables=where[case.block_tables])
    chex.assert_trees_all_equal(run_short(*case.arrays)[:2], run_short(*moved.arrays)[:2], strict=True)


def test_nan_stays_in_its_sequence(run_short) -> None:  # type: ignore[no-untyped-def]
    """A NaN that one sequence sees comes out as NaN there, and leaves the others' bits alone."""
    case = make_case(4, SHORT, ROWS, WINDOW)
    clean = run_short(*case.arrays)[0]
    for row in range(4):
        pages = tuple(p.copy() for p in case.pages)
        last = int(case.seq_lens[row]) - 1
        pages[0][case.block_tables[row, last // 16], last % 16] = np.nan
        start, end = case.query_start_loc[row : row + 2]
        out = run_short(*dataclasses.replace(case, pages=pages).arrays)[0]
        assert np.isnan(out[end - 1].astype(np.float32)).all()
        others = np.delete(np.arange(out.shape[0]), np.arange(start, end))
        np.testing.assert_array_equal(out[others], clean[others])


def test_padding_is_silent(run_short) -> None:  # type: ignore[no-untyped-def]
    """Tokens and rows of padding give 0 and -inf, whatever stands in their places."""
    case = make_case(5, SHORT, [(1, 5), (7, 7)], WINDOW)
    case.q[8:] = np.nan
    case.seq_lens[2:] = 48
    case.block_tables[2:] = 7
    case.query_start_loc[3:] = 40  # row 2 would hold all the rest, but is not real
    out, lse, _ = run_short(*case.arrays)
    assert_right((out, lse), case, WINDOW)
    assert (out[8:] == 0).all()
    assert (lse[8:] == -np.inf).all()


def test_the_split_of_rows_does_not_matter(run_short) -> None:  # type: ignore[no-untyped-def]
    """`distribution` may call every sequence mixed."""
    case = make_case(8, SHORT, ROWS, WINDOW)
    mixed = dataclasses.replace(case, distribution=np.array([0, 0, 4], np.int32))
    assert_right(run_short(*mixed.arrays), mixed, WINDOW)


def test_extreme_sinks_do_not_overflow() -> None:
    """A sink far above the logits takes all the weight, far below none."""
    options = Options(sinks=np.array([-1e30, 1e4, 1e38, 0], np.float32))
    shape = dataclasses.replace(SHORT, num_tokens=1)
    case = make_case(7, shape, [(1, 130)])
    out, lse, _ = compiled(shape, options)(*case.arrays)
    expected_out, expected_lse = case.expected(options)
    for head in range(4):
        assert_close(out[:, head], expected_out[:, head], "bfloat16", "out")
        assert_close(lse[:, head], expected_lse[:, head], "bfloat16 weights", "lse")


def test_a_sink_without_bound_is_as_in_the_reference() -> None:
    """Sinks at and beyond the largest float give out 0 and the reference's LSE, for one query and for many."""
    options = Options(sinks=np.array([np.inf, 3e38, -np.inf, -3e38], np.float32))
    case = make_case(7, SHORT, [(1, 130), (9, 40)])
    out, lse, _ = compiled(SHORT, options)(*case.arrays)
    expected = run_reference(case, options)
    assert (out[:, :2] == 0).all()
    for head in range(4):
        assert_close(out[:, head], expected.out[:, head], "bfloat16", "out")
        assert_close(lse[:, head], expected.lse[:, head], "bfloat16 weights", "lse")


@pytest.mark.skipif(tpu_device() is not None, reason="a chip takes one of the two ways")
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.sweep)])
def test_float8_pages_may_be_products_operands(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of float8 as they are, and as bfloat16, which holds them exactly, give the same."""
    shape = dataclasses.replace(SHORT, num_tokens=4, kv_dtype=kv_dtype)
    case = make_case(3, shape, [(1, 190), (1, 7), (1, 128)], WINDOW)
    results = []
    for chip in ("v7x", "v6e"):
        monkeypatch.setattr(kernel_tpu, "chip_name", lambda chip=chip: chip)
        jax.clear_caches()
        results.append(compiled(shape, WINDOW)(*case.arrays)[:2])
    assert_right(results[0], case, WINDOW)
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-6)
    jax.clear_caches()


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("step", ["whole", "any"])
def test_a_planted_race_is_found(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages loaded into the buffer that is attended next, where whole blocks start or others: a race is reported."""
    start = KVBlocks._start_page

    def into_the_next_buffer(self: KVBlocks, entry: Any, j: Any, slot: Any) -> None:
        if (step == "whole") != isinstance(j, int):
            start(self, entry, j, slot)
            return
        page, window = self.pages.at[self.items.entries[entry]], self._window(1 - slot, j, 1)
        pltpu.make_async_copy(page, window, self.arrived.at[slot]).start()

    monkeypatch.setattr(KVBlocks, "_start_page", into_the_next_buffer)
    jax.clear_caches()
    shape = dataclasses.replace(SHORT, num_tokens=1, num_columns=40)
    run = compiled(shape, Options(), SMALL_BLOCKS._replace(decode_buffers=2))
    case = make_case(9, shape, [(1, 600)])
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*case.arrays)
    jax.clear_caches()


@pytest.mark.parametrize("most_fused_tokens", [40, 39], ids=["fused", "apart"])
def test_the_op_writes_new_kv_and_attends(most_fused_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" on packed pages: two requests share a prefix that the step itself writes, in both orders."""
    monkeypatch.setattr(kernel_tpu, "MOST_FUSED_TOKENS", most_fused_tokens)
    jax.clear_caches()
    new_kv = tuple(random_values(np.random.default_rng(0), (40, 2, 128), "bfloat16") for _ in range(2))

    def step(q, pages, tables, lens, starts, distribution, k, v, slots):  # type: ignore[no-untyped-def]
        arrays = (q, pages, tables, lens, starts, distribution)
        extra = {"new_kv": (k, v), "slot_mapping": slots, "num_kv_heads": 2, "sm_scale": 0.125, "return_lse": True}
        return ragged_paged_attention(*arrays, **extra, backend="tpu")

    run = None
    for writer, rows in ((1, [(1, 17), (21, 21)]), (0, [(21, 21), (19, 35)])):
        case = make_case(11, SHORT, rows)
        case.distribution[:2] = int(writer == 1)
        case.block_tables[1 - writer, :1] = case.block_tables[writer, :1]  # the first page is shared
        slots = np.full(40, -1, np.int32)
        start, own = int(case.query_start_loc[writer]), np.arange(21)
        slots[start : start + 21] = case.block_tables[writer, own // 16] * 16 + own % 16
        arguments = (*case.arrays, *(jnp.asarray(x) for x in (*new_kv, slots)))
        run = run or compile_on_tpu(step, *arguments)
        out, lse, pages = run(*arguments)
        written = dataclasses.replace(case, pages=tuple(p.copy() for p in case.pages))
        for t in np.flatnonzero(slots >= 0):
            written.pages[0][slots[t] // 16, slots[t] % 16] = np.stack([new_kv[0][t], new_kv[1][t]], axis=1)
        np.testing.assert_array_equal(pages[0].view(np.uint8), written.pages[0].view(np.uint8))
        assert_right((out, lse), written, Options())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"platform": "cpu"}, "TPU kernels read packed pages"),
    "float16": ({"kv_dtype": "float16"}, "TPU has no arithmetic on float16 pages"),
    "page": ({"page_size": 24}, "page sizes that are powers of two from 8 to 512, got 24"),
    "small page": ({"page_size": 4}, "page sizes that are powers of two from 8 to 512, got 4"),
    "chunk": ({}, "attention chunks of at least 8 tokens, got 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" refuses; "auto" on a TPU, tried once, warns once and gives what the reference gives."""
    change, message = BAD[name]
    shape = dataclasses.replace(SHORT, **change)
    case = make_case(12, shape, [(1, 5), (3, 9)])
    arguments = {"sm_scale": 0.1, "num_kv_heads": 2, "attention_chunk_size": 7 if name == "chunk" else None}
    with pytest.raises(NotImplementedError, match=f"ragged_paged_attention: .*{message}"):
        ragged_paged_attention(*case.arrays, **arguments, backend="tpu")
    if name != "page":
        return
    expected = ragged_paged_attention(*case.arrays, **arguments, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = ragged_paged_attention(*case.arrays, **arguments)
    np.testing.assert_array_equal(np.asarray(result.out), np.asarray(expected.out))
    ragged_paged_attention(*case.arrays, **arguments)  # no second warning
