"""A layer of DeepSeek V4 made of its ops, in steps over pages that come and go, against the whole sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressor_update import compressor_update, max_new_entries
from pallas_kernels.compressor_update.oracle import compressed
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.indexer_topk.oracle import picked
from pallas_kernels.latent_write import latent_write
from pallas_kernels.layouts import cdiv
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.sparse_mla_attention.oracle import attention
from tests.pallas_kernels.cases import assert_close

RATIO, WINDOW, TOPK, HEADS, DIM, INDEX_HEADS, INDEX_DIM = 4, 6, 3, 2, 8, 2, 6
LENGTH, NUM_TOKENS, NUM_ROWS = 40, 24, 2
WINDOW_PAGE, STATE_PAGE, ENTRY_PAGE = 4, 4, 3
INPUTS = {  # of every token
    "q": (HEADS, DIM),
    "latent": (DIM,),
    "kv": (2 * DIM,),
    "scores": (2 * DIM,),
    "index_q": (INDEX_HEADS, INDEX_DIM),
    "index_weights": (INDEX_HEADS,),
    "index_kv": (2 * INDEX_DIM,),
    "index_scores": (2 * INDEX_DIM,),
}
SINKS = np.array([0.5, -np.inf], np.float32)


class Pages:
    """Tables of one group, and its arrays: NaN but for the null page, and NaN again when a page is given back."""

    def __init__(self, rng: np.random.Generator, size: int, tokens_per_state: int, *widths: int) -> None:
        self.size, self.ratio = size, tokens_per_state
        columns = cdiv(LENGTH, size * tokens_per_state)
        self.arrays = [np.full((1 + NUM_ROWS * columns, size, width), np.nan, np.float32) for width in widths]
        for array in self.arrays:
            array[0] = 0
        self.tables = np.zeros((NUM_ROWS, columns), np.int32)
        self.free = rng.permutation(np.arange(1, 1 + NUM_ROWS * columns)).tolist()

    def advance(self, row: int, first: int, end: int, window: int | None) -> np.ndarray:
        """Slots of the states that tokens [first, end) complete; what lies before the window is given back."""
        block = self.size * self.ratio
        for column in range(0 if window is None else max(first - window + 1, 0) // block):
            page, self.tables[row, column] = int(self.tables[row, column]), 0
            if page:
                self.free.append(page)
                for array in self.arrays:
                    array[page] = np.nan
        for column in range(first // block, cdiv(end, block)):
            if not self.tables[row, column]:
                self.tables[row, column] = self.free.pop(0)
        states = np.arange(first // self.ratio, end // self.ratio)
        return self.tables[row, states // self.size] * self.size + states % self.size


@jax.jit
def layer(x: dict[str, Any], bias: Any, index_bias: Any, step: Any, tables: Any, slots: Any, pages: Any) -> Any:
    """(out, lse, pages) of one step."""
    window, states, index_states, entries, index_entries = pages
    in_states = (tables["states"], *step, slots["states"])
    new = compressor_update(x["kv"], x["scores"], (states,), *in_states, position_bias=bias, overlap=True)
    index = compressor_update(
        x["index_kv"], x["index_scores"], (index_states,), *in_states, position_bias=index_bias, overlap=True
    )
    entry_pages = latent_write(new.entries, (entries,), slots["entries"])
    index_pages = latent_write(index.entries, (index_entries,), slots["entries"])
    best = indexer_topk(
        x["index_q"], x["index_weights"], index_pages, tables["entries"], *step, topk=TOPK, tokens_per_state=RATIO
    )
    result = sparse_mla_attention(
        x["q"],
        (window,),
        tables["window"],
        *step,
        compressed_pages=entry_pages,
        compressed_tables=tables["entries"],
        tokens_per_state=RATIO,
        topk_indices=best,
        new_kv=x["latent"],
        slot_mapping=slots["window"],
        sm_scale=DIM**-0.5,
        sliding_window=WINDOW,
        sinks=jnp.asarray(SINKS),
        return_lse=True,
    )
    return result.out, result.lse, (*result.pages, *new.pages, *index.pages, *entry_pages, *index_pages)


def whole(x: dict[str, np.ndarray], bias: np.ndarray, index_bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all tokens of one sequence."""
    entries = compressed(x["kv"], x["scores"], bias, overlap=True)
    keys = compressed(x["index_kv"], x["index_scores"], index_bias, overlap=True)
    results = []
    for pos in range(LENGTH):
        visible = (pos + 1) // RATIO
        best = picked(x["index_q"][pos], x["index_weights"][pos], keys[:visible], TOPK)
        latents = [*x["latent"][max(0, pos - WINDOW + 1) : pos + 1], *entries[best]]
        results.append(attention(x["q"][pos], latents, DIM**-0.5, SINKS))
    out, lse = zip(*results, strict=True)
    return np.array(out), np.array(lse)


@pytest.mark.parametrize("chunks", [[(19, 5)], [(1, 1)], [(7, 0), (0, 9), (1, 1), (3, 12)]], ids=str)
def test_steps_of_any_cut_equal_the_whole(chunks: Sequence[tuple[int, int]]) -> None:
    """Two sequences; each step takes the next of `chunks` from them, over and over, as far as they go."""
    rng = np.random.default_rng(7)
    data = {name: rng.standard_normal((NUM_ROWS, LENGTH, *shape)).astype(np.float32) for name, shape in INPUTS.items()}
    bias, index_bias = (rng.standard_normal((RATIO, 2 * dim)).astype(np.float32) for dim in (DIM, INDEX_DIM))
    groups = {
        "window": Pages(rng, WINDOW_PAGE, 1, DIM),
        "states": Pages(rng, STATE_PAGE, 1, 4 * DIM, 4 * INDEX_DIM),
        "entries": Pages(rng, ENTRY_PAGE, RATIO, DIM, INDEX_DIM),
    }
    windows = {"window": WINDOW, "states": 2 * RATIO, "entries": None}
    room = {"window": NUM_TOKENS, "states": NUM_TOKENS, "entries": max_new_entries(NUM_TOKENS, NUM_ROWS, RATIO)}
    outs: list[list[np.ndarray]] = [[], []]
    lses: list[list[np.ndarray]] = [[], []]
    done = np.zeros(NUM_ROWS, np.int32)
    for i in range(1000):
        counts = np.minimum(chunks[i % len(chunks)], LENGTH - done)
        if not counts.any() and (done == LENGTH).all():
            break
        slots = {name: np.full(room[name], -1, np.int32) for name in groups}
        for name, group in groups.items():
            found = [group.advance(r, done[r], done[r] + counts[r], windows[name]) for r in range(NUM_ROWS)]
            slots[name][: sum(map(len, found))] = np.concatenate(found)
        taken = {name: [x[r, done[r] : done[r] + counts[r]] for r in range(NUM_ROWS)] for name, x in data.items()}
        padding = NUM_TOKENS - counts.sum()
        x = {
            name: np.concatenate([*rows, np.ones((padding, *INPUTS[name]), np.float32)]) for name, rows in taken.items()
        }
        done += counts.astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        step = (done, starts, np.array([0, 0, NUM_ROWS], np.int32))
        pages = [array for group in groups.values() for array in group.arrays]
        tables = {name: group.tables for name, group in groups.items()}
        out, lse, pages = layer(x, bias, index_bias, step, tables, slots, pages)
        arrays = iter(pages)
        for group in groups.values():
            group.arrays = [np.array(next(arrays)) for _ in group.arrays]
        for r in range(NUM_ROWS):
            outs[r].append(np.asarray(out)[starts[r] : starts[r + 1]])
            lses[r].append(np.asarray(lse)[starts[r] : starts[r + 1]])
    for r in range(NUM_ROWS):
        out, lse = whole({name: x[r] for name, x in data.items()}, bias, index_bias)
        assert_close(np.concatenate(outs[r]), out, "float32", "out")
        assert_close(np.concatenate(lses[r]), lse, "float32", "lse")
