"""Bytes and operations of DeepSeek V4's benchmarks, counted again one query and entry at a time; their numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels.cases import steps
from pallas_kernels.cases.case import CaseT, Step, of_step
from pallas_kernels.cases.entries import Entries, entry_pages, entry_rows
from pallas_kernels.compressor_update.cases import CompressorCase
from pallas_kernels.indexer_topk.cases import IndexerCase, whole_keys
from pallas_kernels.latent_entries import IndexFp8, LatentFp8
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention.cases import SparseCase
from pallas_kernels.sparse_mla_attention.shapes import SparseShape

SHAPE = SparseShape("x", "x", 3, topk=5, dim=128, sliding_window=7, num_index_heads=2, index_dim=16, ratios=(4, 128))
SMALL = Step(small=True)
KINDS = ("decode", "prefill", "mixed")


def small_case(case_type: type[CaseT], kind: str, shape: SparseShape, dtype: str = "bfloat16") -> CaseT:
    return of_step(case_type, shape, kind, SMALL, platform="tpu", page=4, dtype=dtype)


def queries(entries: Entries) -> list[tuple[int, int, int]]:
    """(sequence, token, position) of each query."""
    positions = [(s, p) for s, (q, n) in enumerate(entries.rows) for p in range(n - q, n)]
    return [(s, token, p) for token, (s, p) in enumerate(positions)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_attention(kind: str, ratio: int, dtype: str) -> None:
    layer = f"ratio {ratio}" if ratio else "window"
    found = small_case(SparseCase, f"{kind} {layer}", SHAPE, dtype)
    entries, topk = Entries(entry_rows(kind, SMALL), ratio or 1), found.topk
    picks = entries.picks(topk)
    state_bytes = 2 * 128 if dtype == "bfloat16" else LatentFp8().width(128)
    read, num_bytes, flops = set(), 0, 0
    for s, token, pos in queries(entries):
        seen = {("token", s, k) for k in range(max(0, pos - 6), pos + 1)}
        if ratio == 4:
            seen |= {("entry", s, e) for e in picks[token].tolist() if e >= 0}
        elif ratio:
            seen |= {("entry", s, e) for e in range(pos + 1) if ratio * (e + 1) <= pos + 1}
        read |= seen
        num_bytes += 2 * 3 * 128 * 2 + 4 * topk * (ratio == 4)
        flops += len(seen) * 3 * 4 * 128
    assert found.work == (num_bytes + len(read) * state_bytes, flops)


@pytest.mark.parametrize("kind", KINDS)
def test_picks_are_distinct_entries_that_the_query_sees(kind: str) -> None:
    entries = Entries(entry_rows(kind, SMALL), 4)
    picks = entries.picks(9)
    for _, token, pos in queries(entries):
        picked = picks[token][picks[token] >= 0]
        assert len(set(picked.tolist())) == len(picked) == min(9, (pos + 1) // 4)
        assert ((picked + 1) * 4 <= pos + 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_indexer(kind: str, dtype: str) -> None:
    found = small_case(IndexerCase, kind, SHAPE, dtype)
    entries = Entries(entry_rows(kind, SMALL), 4)
    seen = {(s, e) for s, _, pos in queries(entries) for e in range(pos + 1) if 4 * (e + 1) <= pos + 1}
    num_bytes = len(seen) * (2 * 16 if dtype == "bfloat16" else 16 + 4)
    flops = 0
    for _, _, pos in queries(entries):
        num_bytes += 2 * (2 * 16 + 4) + 4 * found.topk
        for _ in range((pos + 1) // 4):
            flops += 2 * (2 * 16 + 2)
    assert found.work == (num_bytes, flops)


def test_keys_of_the_indexer_are_whole_numbers_in_fp8_too() -> None:
    pages = entry_pages(np.random.default_rng(0), 16, 4, 6, "float8_e4m3fn", "tpu", IndexFp8(), whole_keys)
    keys = np.asarray(IndexFp8().decode(pages[1:].reshape(-1, pages.shape[-1]), 16))
    assert (keys == np.rint(keys)).all()
    assert 1 < np.abs(keys[:, 1:]).mean() < 14
    assert not np.asarray(pages[0]).any()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize(("ratio", "dim"), [(4, 8), (128, 8)])
def test_the_compressor(kind: str, ratio: int, dim: int) -> None:
    found = replace(small_case(CompressorCase, f"{kind} ratio {ratio}", SHAPE), dim=dim)
    halves = 2 if ratio == 4 else 1  # of a token: for the entry after its own, and for its own
    num_bytes = flops = 0
    for q_len, length in found.step_rows:
        computed = length - q_len
        for _ in range(q_len * halves * dim):
            num_bytes += 2 * (2 + 4)  # KV and score, read and stored
            flops += 1
        for end in range(computed + 1, length + 1):
            if end % ratio:
                continue
            num_bytes += 4 * dim
            for token in range(max(0, end - halves * ratio), end):
                flops += 3 * dim
                num_bytes += 2 * 4 * dim * (token < computed)
    assert found.work == (num_bytes, flops)


def test_slots_are_where_the_tables_say() -> None:
    step = steps.Step(((1, 9), (3, 6)), MaskRule(), 4)
    tables = np.array([[5, 6, 7], [8, 9, 0]])
    assert step.new_slots(tables).tolist() == [7 * 4 + 0, 8 * 4 + 3, 9 * 4 + 0, 9 * 4 + 1]


def test_a_quarter_of_decoding_sequences_completes_an_entry() -> None:
    small = small_case(CompressorCase, "decode ratio 4", SHAPE)
    (entries, positions), _ = small.call("reference", *small.arguments(0))
    assert len(entries) == 4
    assert [p for p in positions.tolist() if p >= 0] == [252]
