"""The mask rule and its page runs against the keys counted one by one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.oracle import Options, visible_keys

RULES = [
    MaskRule(causal, window, chunk, sinks)
    for causal in (True, False)
    for window in (None, 1, 5, 16)
    for chunk in (None, 1, 6)
    for sinks in (0, 1, 7)
]


def _keys(rule: MaskRule, first: int, last: int, seq_len: int) -> list[int]:
    """Keys that the queries at `first ... last` see, by the oracle."""
    fields = {name: value for name, value in dataclasses.asdict(rule).items() if name != "sinks_by_sequence"}
    options = Options(**fields)
    return sorted({k for pos in range(first, last + 1) for k in visible_keys(pos, seq_len, options)})


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_page_runs_hold_exactly_the_pages_seen(page_size: int) -> None:
    """Every page of the run holds a key that some query sees, and no other page does; `max_pages` bounds them."""
    rng = np.random.default_rng(page_size)
    seq_len = rng.integers(1, 40, 12)
    first = rng.integers(0, seq_len)
    last = rng.integers(first, seq_len)
    places = np.arange(-(-40 // page_size))[:, None]
    for rule in RULES:
        run = rule.page_run(first, last, seq_len, page_size)
        columns = np.asarray(run.column(places))
        for i, num_pages in enumerate(np.asarray(run.num_pages)):
            seen = {k // page_size for k in _keys(rule, first[i], last[i], seq_len[i])}
            assert columns[:num_pages, i].tolist() == sorted(seen)
            assert num_pages <= rule.max_pages(int(last[i] - first[i] + 1), places.size, page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_sequences_of_their_own_sink_tokens_see_the_same_as_with_these_for_all(page_size: int) -> None:
    """Where sink tokens reach the window, the run is one from the first page on."""
    rng = np.random.default_rng(page_size)
    seq_len = rng.integers(1, 60, 40)
    first = rng.integers(0, seq_len)
    last = rng.integers(first, seq_len)
    sinks = rng.integers(0, 40, 40)
    places, key_pos = np.arange(-(-60 // page_size))[:, None], np.arange(60)
    for window, chunk in ((1, None), (5, None), (None, 6), (16, 10)):
        rule = MaskRule(True, window, chunk, sinks_by_sequence=True)
        run = rule.page_run(first, last, seq_len, page_size, sinks)
        columns = np.asarray(run.column(places))
        for i, num_pages in enumerate(np.asarray(run.num_pages)):
            keys = _keys(MaskRule(True, window, chunk, int(sinks[i])), first[i], last[i], seq_len[i])
            assert columns[:num_pages, i].tolist() == sorted({k // page_size for k in keys})
            assert num_pages <= rule.max_pages(int(last[i] - first[i] + 1), places.size, page_size)
            seen = rule.visible(key_pos, first[i], last[i], seq_len[i], sinks[i])
            assert np.flatnonzero(np.asarray(seen)).tolist() == keys


def test_visible_is_the_union_over_the_queries() -> None:
    """`visible` for a run of positions is what any of them sees."""
    key_pos = np.arange(40)
    for rule in RULES:
        for first, last, seq_len in ((0, 0, 1), (3, 11, 14), (11, 11, 14), (20, 33, 39)):
            got = np.flatnonzero(np.asarray(rule.visible(key_pos, first, last, seq_len)))
            assert got.tolist() == _keys(rule, first, last, seq_len)


def test_bounds_never_fall_and_hold_the_query() -> None:
    """`lower <= pos <= upper`, neither falls as the position grows: runs of queries see runs of keys."""
    pos = np.arange(60)
    for rule in RULES:
        lower = np.asarray(rule.lower(pos))
        upper = np.asarray(rule.upper(pos, 60)) + np.zeros_like(pos)
        assert (lower <= pos).all()
        assert (pos <= upper).all()
        assert (np.diff(lower) >= 0).all()
        assert (np.diff(upper) >= 0).all()


def test_no_query_sees_no_page() -> None:
    """A tile without queries (last position -1) has an empty run, also with sink tokens."""
    for rule in RULES:
        assert int(rule.page_run(0, -1, 12, 4).num_pages) == 0


def test_traced_and_plain_numbers_agree() -> None:
    """The rule is the same for Python ints, numpy arrays and traced arrays."""
    rule = MaskRule(True, 5, 8, 2)
    first, last, seq_len = np.array([0, 7, 30]), np.array([3, 9, 31]), np.array([4, 20, 32])
    traced = jax.jit(lambda a, b, n: rule.page_run(a, b, n, 4))(jnp.asarray(first), jnp.asarray(last), seq_len)
    for i in range(3):
        plain = rule.page_run(int(first[i]), int(last[i]), int(seq_len[i]), 4)
        assert [int(x) for x in plain] == [int(x[i]) for x in traced]
