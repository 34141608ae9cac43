"""What holds of paged attention whatever the numbers: independence, splitting, merging, isolation of NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options, visible_keys
from tests.pallas_kernels.cases import Case, Shape, assert_close, assert_matches_oracle, make_case, random_values, run

SHAPE = Shape(num_tokens=40, num_rows=4, num_columns=12, page_size=4)
CROSS = Options(causal=False)
WINDOW = Options(sliding_window=9, num_sink_tokens=2)
ROWS = [(1, 30), (1, 1), (17, 40), (20, 20)]


def test_order_of_pages_does_not_matter() -> None:
    """Pages in another order under a table that names them so: equal bits."""
    case = make_case(1, SHAPE, ROWS, WINDOW)
    order = np.concatenate([[0], 1 + np.random.default_rng(2).permutation(case.pages[0].shape[0] - 1)])
    where = np.argsort(order).astype(np.int32)
    moved = dataclasses.replace(case, pages=tuple(p[order] for p in case.pages), block_tables=where[case.block_tables])
    chex.assert_trees_all_equal(run(case, WINDOW)[:2], run(moved, WINDOW)[:2], strict=True)


@pytest.mark.parametrize("row", range(4))
def test_a_sequence_does_not_see_the_others(row: int) -> None:
    """A sequence alone, first in the batch, has the bits that it has among others."""
    case = make_case(3, SHAPE, ROWS, WINDOW)
    start, end = case.query_start_loc[row : row + 2]
    alone = dataclasses.replace(
        case,
        q=np.roll(case.q, -start, axis=0),
        block_tables=np.roll(case.block_tables, -row, axis=0),
        seq_lens=np.array([case.seq_lens[row], 0, 0, 0], np.int32),
        query_start_loc=np.array([0, *[end - start] * 4], np.int32),
        distribution=np.array([0, 0, 1], np.int32),
    )
    together, single = run(case, WINDOW), run(alone, WINDOW)
    among_others = together.out[start:end], together.lse[start:end]
    chex.assert_trees_all_equal(among_others, (single.out[: end - start], single.lse[: end - start]), strict=True)


def test_nan_stays_in_its_sequence() -> None:
    """A NaN value that one sequence sees leaves the others' bits alone, also where they share a tile of tokens."""
    case = make_case(4, SHAPE, [(1, 9), (1, 9), (9, 9), (9, 9)])
    clean = run(case, Options())
    for row in range(4):
        pages = tuple(p.copy() for p in case.pages)
        for array in pages:
            array[case.block_tables[row, 0], 0] = np.nan
        start, end = case.query_start_loc[row : row + 2]
        out = np.asarray(run(dataclasses.replace(case, pages=pages), Options()).out)
        assert np.isnan(out[start:end]).all()
        others = np.delete(np.arange(out.shape[0]), np.arange(start, end))
        np.testing.assert_array_equal(out[others], np.asarray(clean.out)[others])


@pytest.mark.parametrize("rows", [[(1, 5), (9, 3), (17, 16)], [(1, 0), (20, 1), (12, 40)]])
def test_cross_attention_may_have_more_queries_than_keys(rows: list[tuple[int, int]]) -> None:
    """Without a mask every query sees every key of its sequence, and a sequence without keys gives nothing."""
    assert_matches_oracle(make_case(6, SHAPE, rows, CROSS), CROSS)


def test_padding_is_silent() -> None:
    """Tokens and rows of padding give 0 and -inf, whatever stands in their places."""
    case = make_case(5, SHAPE, [(1, 5), (7, 7)])
    case.q[8:] = np.nan
    case.seq_lens[2:] = 48
    case.block_tables[2:] = 7
    case.query_start_loc[3:] = 40  # row 2 would hold all the rest, but is not real
    result = assert_matches_oracle(case, Options())
    assert (np.asarray(result.out)[8:] == 0).all()
    assert (np.asarray(result.lse)[8:] == -np.inf).all()


def test_padding_is_silent_with_sinks() -> None:
    """A sink does not make padding real: out 0 and LSE -inf all the same."""
    options = Options(sinks=np.full(4, 2.0, np.float32))
    result = assert_matches_oracle(make_case(6, SHAPE, [(1, 5)]), options)
    assert (np.asarray(result.lse)[1:] == -np.inf).all()


@pytest.mark.parametrize("sink", [-1e30, 1e4, 1e30])
def test_extreme_sinks_do_not_overflow(sink: float) -> None:
    """A sink far above the logits takes all the weight, far below none."""
    options = Options(sinks=np.full(4, sink, np.float32))
    result = assert_matches_oracle(make_case(7, SHAPE, ROWS), options)
    chex.assert_tree_all_finite(result.out)


def test_a_sink_without_bound_takes_all_the_weight() -> None:
    """An infinite sink counts as the largest there is: out 0, and an LSE that still merges."""
    options = Options(sinks=np.array([np.inf, 3e38, 1.7e38, -np.inf], np.float32))
    result = run(make_case(7, SHAPE, ROWS), options)
    real = sum(q_len for q_len, _ in ROWS)
    assert (np.asarray(result.out)[:real, :3] == 0).all()
    expected = np.array([np.finfo(np.float32).max, 3e38, 1.7e38])
    np.testing.assert_allclose(np.asarray(result.lse)[:real, :3], np.broadcast_to(expected, (real, 3)), rtol=1e-6)
    plain = run(make_case(7, SHAPE, ROWS), Options())
    np.testing.assert_array_equal(np.asarray(result.lse)[:, 3], np.asarray(plain.lse)[:, 3])


@pytest.mark.parametrize("mask", [{}, {"sliding_window": 6}, {"causal": False, "sliding_window": 6}, {"causal": False}])
def test_queries_before_position_0_see_nothing(mask: dict[str, Any]) -> None:
    """A sequence of fewer tokens than queries: out 0 and LSE -inf of the first ones, with sinks too."""
    options = Options(**mask, sinks=np.full(4, 2.0, np.float32))
    assert_matches_oracle(make_case(6, SHAPE, [(1, 0), (1, 5), (9, 3), (5, 0)], options), options)


def test_the_split_of_rows_does_not_matter() -> None:
    """`distribution` may call every sequence mixed: equal bits."""
    case = make_case(8, SHAPE, ROWS)
    mixed = dataclasses.replace(case, distribution=np.array([0, 0, 4], np.int32))
    np.testing.assert_array_equal(run(case, Options()).out, run(mixed, Options()).out)


def _whole_sequence(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape, kv_shape = (length, SHAPE.num_q_heads, SHAPE.head_dim), (length, SHAPE.num_kv_heads, SHAPE.head_dim)
    return random_values(rng, shape, "float32"), *(random_values(rng, kv_shape, "float32") for _ in range(2))


def _prefill(chunks: list[int], options: Options) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of one sequence whose tokens come in `chunks`, each call writing its KV first."""
    q, k, v = _whole_sequence(9, sum(chunks))
    case = make_case(9, SHAPE, [(1, 1)])
    table = np.random.default_rng(1).permutation(np.arange(1, 13)).astype(np.int32)
    pages = tuple(jnp.full(p.shape, jnp.nan, jnp.float32).at[0].set(0) for p in case.pages)
    step = jax.jit(
        lambda q, pages, n, starts, k, v, slots: ragged_paged_attention(
            q,
            pages,
            jnp.zeros((4, 12), jnp.int32).at[0].set(jnp.asarray(table)),
            jnp.zeros(4, jnp.int32).at[0].set(n),
            starts,
            jnp.array([0, 0, 1], jnp.int32),
            new_kv=(k, v),
            slot_mapping=slots,
            sm_scale=options.sm_scale,
            sliding_window=options.sliding_window,
            num_sink_tokens=options.num_sink_tokens,
            return_lse=True,
        )
    )
    outs, lses, done = [], [], 0
    for size in chunks:
        positions = np.arange(done, done + size)
        slots = np.full(SHAPE.num_tokens, -1, np.int32)
        slots[:size] = table[positions // SHAPE.page_size] * SHAPE.page_size + positions % SHAPE.page_size
        padded = [np.resize(x[done : done + size], (SHAPE.num_tokens, *x.shape[1:])) for x in (q, k, v)]
        done += size
        starts = jnp.array([0, size, size, size, size], jnp.int32)
        result = step(padded[0], pages, done, starts, padded[1], padded[2], slots)
        pages = result.pages
        outs.append(result.out[:size])
        lses.append(result.lse[:size])
    return np.concatenate(outs), np.concatenate(lses)


@pytest.mark.parametrize("options", [Options(), WINDOW], ids=["full", "window"])
def test_chunked_prefill_equals_one_prefill(options: Options) -> None:
    """Tokens in chunks of any size, one at a time included, see what they see in one call."""
    out, lse = _prefill([38], options)
    for chunks in ([20, 18], [1] * 5 + [33], [37, 1]):
        chunked_out, chunked_lse = _prefill(chunks, options)
        assert_close(chunked_out, out, "float32", "out")
        assert_close(chunked_lse, lse, "float32", "lse")


def test_window_and_rest_merge_to_full_attention() -> None:
    """Keys before the window, attended apart, and the window merge by LSE to attention over all keys."""
    window, lengths = 9, [33, 47, 21, 14]
    case = make_case(10, SHAPE, [(1, n) for n in lengths])
    inside = run(case, Options(sliding_window=window))
    shorter = dataclasses.replace(case, seq_lens=np.array(lengths, np.int32) - window)
    before = run(shorter, Options())
    lse = np.logaddexp(inside.lse[:4], before.lse[:4])
    parts = [np.asarray(x.out[:4]) * np.exp(x.lse[:4] - lse)[..., None] for x in (inside, before)]
    full = run(case, Options())
    assert_close(parts[0] + parts[1], full.out[:4], "float32", "out")
    assert_close(lse, full.lse[:4], "float32", "lse")


def test_new_kv_is_written_first() -> None:
    """New KV is seen by its own step, by every sequence that shares the page, and comes back in the pages."""
    case = make_case(11, SHAPE, [(1, 6), (6, 6)])
    case.block_tables[0] = case.block_tables[1]  # one sequence reads what the other writes
    rng = np.random.default_rng(0)
    new_kv = tuple(random_values(rng, (SHAPE.num_tokens, 2, 16), "float32") for _ in range(2))
    positions = np.arange(6)
    slots = np.full(SHAPE.num_tokens, -1, np.int32)
    slots[1:7] = case.block_tables[1, positions // 4] * 4 + positions % 4
    fused = run(case, Options(), new_kv=new_kv, slot_mapping=slots)
    pages = kv_write(*(jnp.asarray(x) for x in new_kv), case.arrays[1], jnp.asarray(slots))
    apart = assert_matches_oracle(dataclasses.replace(case, pages=tuple(np.asarray(p) for p in pages)), Options())
    chex.assert_trees_all_equal((fused.out, fused.pages), (apart.out, pages), strict=True)


def test_packed_and_split_pages_agree() -> None:
    """The same K and V in both layouts: equal bits."""
    split = make_case(12, SHAPE, ROWS, WINDOW)
    k, v = split.pages
    rows = np.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])
    packed = np.zeros((*k.shape[:2], 4, 1, 128), np.float32)
    packed[..., 0, : k.shape[-1]] = rows
    case = Case(dataclasses.replace(SHAPE, platform="tpu"), split.q, (packed,), *_meta(split))
    np.testing.assert_array_equal(run(split, WINDOW).out, run(case, WINDOW).out)


def _meta(case: Case) -> tuple[np.ndarray, ...]:
    return case.block_tables, case.seq_lens, case.query_start_loc, case.distribution


def test_scales_are_those_of_the_values() -> None:
    """Pages that hold K / k_scale and V / v_scale give what unscaled pages give, up to rounding."""
    case = make_case(13, SHAPE, ROWS)
    scaled = dataclasses.replace(case, pages=(case.pages[0] / 4, case.pages[1] / 8))
    plain = run(case, Options())
    result = run(scaled, Options(k_scale=np.float32(4), v_scale=np.array([8, 8], np.float32)))
    assert_close(result.out, plain.out, "float32", "out")


def test_the_oracle_sees_by_the_rule() -> None:
    """The oracle's own mask on an example small enough to read."""
    options = Options(sliding_window=3, attention_chunk_size=4, num_sink_tokens=1)
    assert visible_keys(6, 9, options) == [0, 4, 5, 6]
    assert visible_keys(5, 9, options) == [0, 4, 5]
    assert visible_keys(3, 9, options) == [0, 1, 2, 3]
    assert visible_keys(5, 7, dataclasses.replace(options, causal=False)) == [0, 4, 5, 6]


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("options", [Options(soft_cap=2.0), WINDOW], ids=["full", "window"])
def test_heads_that_share_keys_do_not_matter(options: Options, page_size: int) -> None:
    """A decoding query gets the same whether its KV head has one, two or four query heads, NaN where nobody sees."""
    shape = Shape(num_tokens=4, num_rows=4, num_columns=3, page_size=page_size, num_q_heads=2, num_kv_heads=2)
    case = make_case(14, shape, [(1, 40), (1, 1), (1, 33)], options)
    one = assert_matches_oracle(case, options)
    for count in (2, 4):
        q = np.repeat(case.q, count, axis=1)
        several = run(dataclasses.replace(case, shape=dataclasses.replace(shape, num_q_heads=2 * count), q=q), options)
        for head in range(count):
            assert_close(several.out[:, head::count], one.out, "float32", "out")
            assert_close(several.lse[:, head::count], one.lse, "float32", "lse")
