"""The vectorised XLA path of ragged_paged_attention against the float64 oracle, NaN wherever unseen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.limits import SMALL_TRIPS
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, xla_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.xla.lanes import Lanes
from pallas_kernels.xla.tiles import Limits
from tests.pallas_kernels.cases import Shape, assert_right, make_case, random_values, static_of

ROWS = [(1, 30), (1, 1), (17, 40), (5, 5)]


def compiled(shape: Shape, options: Options, limits: Limits = SMALL_TRIPS) -> Callable[..., Any]:
    """The path for steps of one shape."""
    v_scale = None if options.v_scale is None else jnp.asarray(options.v_scale, jnp.float32)
    static = static_of(options) | {"num_kv_heads": shape.num_kv_heads, "v_scale": v_scale, "limits": limits}
    return jax.jit(functools.partial(xla_attention.ragged_paged_attention, **static))


def test_sequences_of_several_queries_decode_together() -> None:
    """Speculation: every sequence has up to three queries, so that they take one walk; a longer one another."""
    shape, options = Shape(num_tokens=12, num_rows=4), Options(sliding_window=9)
    run = compiled(shape, options)
    for rows in ([(3, 30), (3, 3), (1, 48), (2, 17)], [(1, 30), (9, 40)]):
        case = make_case(3, shape, rows, options)
        assert_right(run(*case.arrays), case.expected(options), "float32")


def test_equal_steps_give_equal_bits_and_nan_stays_in_its_sequence() -> None:
    """Pieces are merged in an order of their own; what one sequence sees reaches no other."""
    shape = Shape(num_tokens=40, num_rows=4)
    run, case = compiled(shape, Options()), make_case(4, shape, ROWS, Options())
    clean = np.asarray(run(*case.arrays)[0])
    np.testing.assert_array_equal(clean, np.asarray(run(*case.arrays)[0]))
    for row, (start, end) in enumerate(zip(case.query_start_loc, case.query_start_loc[1:], strict=False)):
        pages = tuple(p.copy() for p in case.pages)
        for array in pages:
            array[case.block_tables[row, 0], 0] = np.nan
        out = np.asarray(run(*dataclasses.replace(case, pages=pages).arrays)[0])
        assert np.isnan(out[start:end]).all()
        others = np.delete(np.arange(out.shape[0]), np.arange(start, end))
        np.testing.assert_array_equal(out[others], clean[others])


def test_cross_attention_may_have_more_queries_than_keys() -> None:
    """Without a mask every query sees every key of its sequence, and a sequence without keys gives nothing."""
    shape, options = Shape(num_tokens=40, num_rows=4), Options(causal=False)
    run = compiled(shape, options)
    for rows in ([(1, 5), (9, 3), (17, 16)], [(1, 0), (20, 1), (12, 40)]):
        case = make_case(6, shape, rows, options)
        assert_right(run(*case.arrays), case.expected(options), "float32")


def test_padding_is_silent_and_extreme_sinks_do_not_overflow() -> None:
    """Whatever stands in tokens and rows of padding; sinks of any size."""
    options = Options(sinks=np.array([1e30, -1e30, -np.inf, 2.0], np.float32))
    case = make_case(5, Shape(), [(1, 5), (7, 7)], options)
    case.q[8:] = np.nan
    case.seq_lens[2:] = 48
    case.block_tables[2:] = 7
    case.query_start_loc[3:] = 24  # row 2 would hold all the rest, but is not real
    assert_right(compiled(case.shape, options)(*case.arrays), case.expected(options), "float32")


def test_the_op_writes_new_kv_first_by_this_path() -> None:
    """backend="xla" on CPU: the new KV is written in the call, and all see it."""
    shape = Shape(num_rows=2)
    case = make_case(8, shape, [(1, 9), (6, 6)], Options())
    rng = np.random.default_rng(1)
    new_kv = tuple(random_values(rng, (24, 2, 16), "float32") for _ in range(2))
    slots = np.full(24, -1, np.int32)
    positions = [(0, 8), *((1, place) for place in range(6))]
    for token, (row, pos) in enumerate(positions):
        slots[token] = case.block_tables[row, pos // 4] * 4 + pos % 4
    given = {"new_kv": tuple(map(jnp.asarray, new_kv)), "slot_mapping": jnp.asarray(slots)}
    result = ragged_paged_attention(*case.arrays, **given, sm_scale=0.125, return_lse=True, backend="xla")
    for array, new in zip(case.pages, new_kv, strict=True):
        array.reshape(-1, 2, 16)[slots[:7]] = new[:7]
    assert_right(result, case.expected(Options()), "float32")


@pytest.mark.parametrize("num_lanes", [1, 3, 7, 40])
def test_each_item_is_in_one_trip_and_pieces_are_of_one_lane_and_tile(num_lanes: int) -> None:
    """All items, each once; no trip has two of a piece."""
    counts = np.array([0, 5, 1, 0, 0, 17, 1, 1, 0], np.int32)
    lanes = Lanes.of(jnp.asarray(counts), num_lanes)
    seen, owners = [], {}
    for trip in range(int(lanes.share)):
        tile, kv_tile, piece = (np.asarray(x) for x in lanes.items(jnp.int32(trip)))
        live = piece < lanes.num_pieces
        assert len(set(piece[live])) == live.sum()
        seen += list(zip(tile[live], kv_tile[live], strict=True))
        for lane in np.flatnonzero(live):
            assert owners.setdefault(piece[lane], (lane, tile[lane])) == (lane, tile[lane])
    assert sorted(seen) == [(tile, n) for tile, count in enumerate(counts) for n in range(count)]
