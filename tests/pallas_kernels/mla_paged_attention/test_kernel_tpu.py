"""The TPU kernel against the float64 oracle: ragged steps, NaN wherever unseen, races."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import kernel_tpu, mla_paged_attention
from pallas_kernels.mla_paged_attention.tpu_latents import LatentBlocks
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.mla_paged_attention.mla_cases import Case, Shape, make_case
from tests.pallas_kernels.mla_paged_attention.mla_cases import run as reference

SMALL = kernel_tpu.Tuning(queries=8, units=2, decode_block=128, tile_block=128, decode_part=128, tile_part=128)


def compiled(shape: Shape, options: Options, tuning: kernel_tpu.Tuning = SMALL, tables_in_hbm: bool = False):  # type: ignore[no-untyped-def]
    """The kernel for steps of one shape: (arrays of a case) -> (out, lse)."""
    call = functools.partial(
        kernel_tpu.mla_paged_attention,
        mask=MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens),
        sm_scale=options.sm_scale,
        soft_cap=options.soft_cap,
        sinks=None if options.sinks is None else jnp.asarray(options.sinks, jnp.float32),
        k_scale=None if options.k_scale is None else jnp.asarray(options.k_scale, jnp.float32),
        page_size=shape.latent.page_size,
        return_lse=True,
        tuning=tuning,
        tables_in_hbm=tables_in_hbm,
    )
    return compile_on_tpu(call, *make_case(0, shape, [], options).arrays)


def assert_right(result: tuple[np.ndarray, ...], case: Case, options: Options) -> None:
    out, lse = case.expected(options)
    assert_close(result[0], out, case.shape.q_dtype, "out")
    assert_close(result[1], lse, "float32", "lse")


@pytest.mark.parametrize(
    "mask", [{}, *(pytest.param(mask, marks=pytest.mark.sweep) for mask in ({"sliding_window": 20}, {"causal": False}))]
)
def test_queries_before_position_0_see_nothing(mask: dict[str, Any]) -> None:
    """A live sequence of fewer tokens than queries: out 0 and LSE -inf of the first ones, and it stops no other."""
    shape = Shape(30, 5, 10, 4, 8, "bfloat16", LatentShape(24, 16, "bfloat16", "tpu"))
    options = Options(**mask, sinks=np.array([2.0, np.inf, -np.inf, 3e38], np.float32))
    run = compiled(shape, options)
    for rows in ([(1, 0), (1, 130), (9, 3), (19, 40)], [(1, 0), (13, 0)], [(11, 2), (9, 9)], []):
        case = make_case(1, shape, rows, options)
        out, lse = run(*case.arrays)
        expected = reference(case, options)
        for head in range(4):
            assert_close(out[:, head], expected.out[:, head], "bfloat16", "out")
            assert_close(lse[:, head], expected.lse[:, head], "bfloat16 weights", "lse")


SHORT = Shape(40, 4, 12, 5, 8, "bfloat16", LatentShape(24, 16, "bfloat16", "tpu"))
ROWS = [(1, 130), (1, 1), (17, 190), (13, 13)]
WINDOW = Options(sliding_window=50, num_sink_tokens=3)


@pytest.fixture(scope="module")
def run_short():  # type: ignore[no-untyped-def]
    """The kernel for steps of SHORT with a window and sink tokens, tables in HBM."""
    return compiled(SHORT, WINDOW, SMALL._replace(units=4), tables_in_hbm=True)


def test_random_steps(run_short) -> None:  # type: ignore[no-untyped-def]
    """Ragged decodes share steps with each other, and end anywhere in them."""
    for seed in range(4):
        rows = [(1, int(n)) for n in np.random.default_rng(seed).integers(1, 193, 4)] if seed % 2 else None
        case = make_case(seed, SHORT, rows, WINDOW)
        assert_right(run_short(*case.arrays), case, WINDOW)


def test_order_of_pages_does_not_matter(run_short) -> None:  # type: ignore[no-untyped-def]
    """Pages in another order under a table that names them so: equal bits."""
    case = make_case(1, SHORT, ROWS, WINDOW)
    order = np.concatenate([[0], 1 + np.random.default_rng(2).permutation(case.page.shape[0] - 1)])
    where = np.argsort(order).astype(np.int32)
    moved = dataclasses.replace(case, page=case.page[order], block_tables=where[case.block_tables])
    chex.assert_trees_all_equal(run_short(*case.arrays), run_short(*moved.arrays), strict=True)


def test_nan_stays_in_its_sequence(run_short) -> None:  # type: ignore[no-untyped-def]
    """A NaN that one sequence sees comes out as NaN there, and leaves the others' bits alone."""
    case = make_case(4, SHORT, ROWS, WINDOW)
    clean = run_short(*case.arrays)[0]
    for row in (0, 2):
        page = case.page.copy()
        last = int(case.seq_lens[row]) - 1
        page[case.block_tables[row, last // 16], last % 16 // 2, :, last % 2] = np.nan
        start, end = case.query_start_loc[row : row + 2]
        out = run_short(*dataclasses.replace(case, page=page).arrays)[0]
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
    out, lse = run_short(*case.arrays)
    assert_right((out, lse), case, WINDOW)
    assert (out[8:] == 0).all()
    assert (lse[8:] == -np.inf).all()


def test_the_split_of_rows_does_not_matter(run_short) -> None:  # type: ignore[no-untyped-def]
    """`distribution` may call every sequence mixed."""
    case = make_case(8, SHORT, ROWS, WINDOW)
    mixed = dataclasses.replace(case, distribution=np.array([0, 0, 4], np.int32))
    assert_right(run_short(*mixed.arrays), mixed, WINDOW)


LONG = Shape(6, 6, 40, 16, 64, "bfloat16", LatentShape(576, 64, "bfloat16", "tpu"))


@pytest.mark.sweep
def test_sizes_of_deepseek_v3() -> None:
    """16 heads of 512 + 64 in blocks of the default size: whole steps, steps of several sequences, empty rows."""
    run = compiled(LONG, Options(), kernel_tpu.Tuning())
    for seed, lens in ((0, [2560, 1, 513, 1024, 700, 64]), (1, [511, 512, 2, 2048, 2049]), (2, [2500])):
        case = make_case(seed, LONG, [(1, n) for n in lens], Options())
        assert_right(run(*case.arrays), case, Options())


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("pages", ["whole", "any"])
def test_a_planted_race_is_found(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages loaded into the buffer in use, of whole blocks or of others: a race is reported."""
    start_page = LatentBlocks._start_page
    size = 64 if pages == "whole" else 16  # few DMAs: the detector's clocks are short

    def into_the_buffer_in_use(self: LatentBlocks, entry: Any, j: Any, *, slot: Any, i: int) -> None:
        if (pages == "whole") != isinstance(j, int):
            return start_page(self, entry, j, slot=slot, i=i)
        target = self.buffer.at[1 - slot, i, pl.ds(j * size // 2, size // 2)]
        copy = pltpu.make_async_copy(self.pages.at[self.items.entries[entry]], target, self.arrived.at[slot])
        return copy.start()

    monkeypatch.setattr(LatentBlocks, "_start_page", into_the_buffer_in_use)
    latent = dataclasses.replace(SHORT.latent, page_size=size)
    assert_race(dataclasses.replace(SHORT, num_tokens=1, num_columns=640 // size, latent=latent), [(1, 600)])


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_results_overwritten_on_their_way_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the results before it only after it has made its own."""
    moves, late = kernel_tpu._Moves, []
    wait, start = moves.wait_for_results, moves.start_results
    monkeypatch.setattr(moves, "wait_for_results", lambda *arguments: late.append(arguments))

    def start_after_waiting(self: Any, step: Any) -> None:
        wait(*late.pop())
        start(self, step)

    monkeypatch.setattr(moves, "start_results", start_after_waiting)
    assert_race(dataclasses.replace(SHORT, num_tokens=4), [(1, 100), (1, 100), (1, 100), (1, 100)])


def assert_race(shape: Shape, rows: list[tuple[int, int]]) -> None:
    jax.clear_caches()
    run = compiled(shape, Options())
    case = make_case(9, shape, rows, Options())
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*case.arrays)
    jax.clear_caches()


def test_the_op_writes_new_states_and_attends() -> None:
    """backend="tpu" on packed pages: two requests share a page that the step itself writes."""
    rng = np.random.default_rng(0)
    latent, key = (random_values(rng, (40, dim), "bfloat16") for dim in (16, 8))
    case = make_case(11, SHORT, [(1, 17), (21, 21)], Options())
    case.block_tables[0, :1] = case.block_tables[1, :1]
    slots = np.full(40, -1, np.int32)
    own = np.arange(21)
    slots[1:22] = case.block_tables[1, own // 16] * 16 + own % 16

    def step(latent, key, slots, *arrays):  # type: ignore[no-untyped-def]
        extra = {"new_kv": (latent, key), "slot_mapping": slots, "sm_scale": 0.125, "return_lse": True}
        return mla_paged_attention(*arrays, **extra, backend="tpu")

    arguments = (*(jnp.asarray(x) for x in (latent, key, slots)), *case.arrays)
    out, lse, pages = compile_on_tpu(step, *arguments)(*arguments)
    written = dataclasses.replace(case, page=case.page.copy())
    for t in range(1, 22):
        page, offset = divmod(slots[t], 16)
        row = written.page[page, offset // 2, 0, offset % 2]
        row[:24], row[24:] = np.concatenate([latent[t], key[t]]), 0
    np.testing.assert_array_equal(pages[0].view(np.uint8), written.page.view(np.uint8))
    assert_right((out, lse), written, Options())


BAD: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "split": ({"platform": "cpu"}, None, "TPU kernels read packed latent pages"),
    "float16": ({"dtype": "float16"}, None, "TPU has no arithmetic on float16 pages"),
    "page": ({"page_size": 24}, None, "page sizes that are powers of two from 8 to 512, got 24"),
    "small page": ({"page_size": 4}, None, "page sizes that are powers of two from 8 to 512, got 4"),
    "chunk": ({}, 7, "attention chunks of at least 8 tokens, got 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" refuses; "auto" on a TPU warns once and gives what the reference gives."""
    change, chunk, message = BAD[name]
    shape = dataclasses.replace(SHORT, latent=dataclasses.replace(SHORT.latent, **change))
    case = make_case(12, shape, [(1, 5), (3, 9)], Options(attention_chunk_size=chunk))
    call = functools.partial(mla_paged_attention, *case.arrays, sm_scale=0.1, attention_chunk_size=chunk)
    with pytest.raises(NotImplementedError, match=f"mla_paged_attention: .*{message}"):
        call(backend="tpu")
    if name != "page":
        return
    expected = call(backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = call()
    np.testing.assert_array_equal(np.asarray(result.out), np.asarray(expected.out))
    call()  # no second warning
