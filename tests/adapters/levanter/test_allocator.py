"""The in-jit allocator does what a model of plain lists does, call by call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.adapters.levanter import allocator

PAGES, SEQS, COLUMNS, PAGE = 9, 4, 4, 4
ALLOC = jax.jit(partial(allocator.alloc, page_size=PAGE))
FORK = jax.jit(partial(allocator.fork, page_size=PAGE))
FREE = jax.jit(allocator.free)
DESTS = jax.jit(partial(allocator.new_token_dests, page_size=PAGE, max_tokens=SEQS * COLUMNS * PAGE))


@dataclass
class Model:
    """Page ids of each sequence as a list, and its tokens."""

    pages: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SEQS)])
    lengths: list[int] = field(default_factory=lambda: [0] * SEQS)

    def free_pages(self) -> list[int]:
        held = {page for pages in self.pages for page in pages}
        return [page for page in range(PAGES) if page not in held]

    def alloc(self, num_tokens: list[int]) -> list[bool]:
        left, used, oks = self.free_pages(), 0, []
        for seq, count in enumerate(num_tokens):
            wants = -(-(self.lengths[seq] + count) // PAGE)
            need = wants - len(self.pages[seq])
            ok = wants <= COLUMNS and used + need <= len(left)
            if ok:
                self.pages[seq] += left[used : used + need]
                self.lengths[seq] += count
            used += need if wants <= COLUMNS else 0
            oks.append(ok)
        return oks

    def free(self, seqs: list[int]) -> None:
        for seq in seqs:
            self.pages[seq], self.lengths[seq] = [], 0

    def fork(self, source: int, target: int) -> tuple[bool, int, int]:
        left, partial_page = self.free_pages(), self.lengths[source] % PAGE != 0
        if self.lengths[target] or (partial_page and not left):
            return False, -1, -1
        full = self.lengths[source] // PAGE
        self.lengths[target], self.pages[target] = self.lengths[source], self.pages[source][:full]
        if not partial_page:
            return True, -1, -1
        self.pages[target] = [*self.pages[target], left[0]]
        return True, self.pages[source][full], left[0]


def check(state: allocator.PageState, model: Model) -> None:
    tables = np.full((SEQS, COLUMNS), -1)
    counts = np.zeros(PAGES, int)
    for seq, pages in enumerate(model.pages):
        tables[seq, : len(pages)] = pages
        np.add.at(counts, pages, 1)
    np.testing.assert_array_equal(state.page_indices, tables)
    np.testing.assert_array_equal(state.ref_counts, counts)
    np.testing.assert_array_equal(state.seq_lens, model.lengths)
    assert int(state.num_free) == len(model.free_pages())


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.lists(st.integers(0, 9), min_size=SEQS, max_size=SEQS)),
        st.tuples(st.just("free"), st.lists(st.integers(0, SEQS - 1), max_size=2)),
        st.tuples(st.just("fork"), st.tuples(st.integers(0, SEQS - 1), st.integers(0, SEQS - 1))),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_agrees_with_lists(calls: list[tuple[str, list[int]]]) -> None:
    state, model = allocator.init(PAGES, SEQS, COLUMNS), Model()
    for name, values in calls:
        if name == "alloc":
            before = [list(pages) for pages in model.pages]
            done = ALLOC(state, jnp.asarray(values, jnp.int32))
            oks = model.alloc(values)
            state = done.state
            assert done.ok.tolist() == oks
            new = [pages[len(old) :] for pages, old in zip(model.pages, before, strict=True)]
            assert [[p for p in row if p >= 0] for row in done.new_pages.tolist()] == new
            counts = np.where(oks, values, 0)
            dests, starts = DESTS(state, jnp.asarray(counts, jnp.int32))
            places = [(s, p) for s in range(SEQS) for p in range(model.lengths[s] - counts[s], model.lengths[s])]
            slots = [model.pages[s][p // PAGE] * PAGE + p % PAGE for s, p in places]
            assert dests.tolist() == slots + [-1] * (dests.size - len(slots))
            assert starts.tolist() == [0, *np.cumsum(counts).tolist()]
        elif name == "free":
            state = FREE(state, jnp.isin(jnp.arange(SEQS), jnp.asarray(values, jnp.int32)))
            model.free(values)
        else:
            moved = FORK(state, jnp.int32(values[0]), jnp.int32(values[1]))
            state = moved.state
            assert (bool(moved.ok), int(moved.copy_from), int(moved.copy_to)) == model.fork(*values)
        check(state, model)


@pytest.mark.parametrize("name", ["alloc", "free", "fork"])
def test_no_call_has_a_loop(name: str) -> None:
    """Of XLA's own: what runs does not grow by the page with the number of pages."""
    state = allocator.init(PAGES, SEQS, COLUMNS)
    arguments = {
        "alloc": (ALLOC, jnp.zeros(SEQS, jnp.int32)),
        "free": (FREE, jnp.zeros(SEQS, bool)),
        "fork": (FORK, jnp.int32(0), jnp.int32(1)),
    }
    call, *rest = arguments[name]
    text = str(jax.make_jaxpr(call)(state, *rest))
    assert "while" not in text
    assert "scan[" not in text
