"""Bytes and operations of the kernel benchmarks, counted again one token, head and key at a time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cases import steps
from pallas_kernels.cases.case import Case, Step, Work, of_step
from pallas_kernels.cases.steps import SMALL_ROWS, Rows
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.shapes import DeltaShape
from pallas_kernels.kv_write.cases import WriteCase
from pallas_kernels.latent_write.cases import LatentWriteCase
from pallas_kernels.mask import MaskRule
from pallas_kernels.merge_states.cases import MergeCase
from pallas_kernels.mla_paged_attention.cases import LatentCase
from pallas_kernels.mla_paged_attention.shapes import LatentShape
from pallas_kernels.page_ops.cases import MOVES, MoveCase
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from pallas_kernels.ragged_paged_attention.shapes import AttentionShape
from pallas_kernels.ssm_update.cases import ConvCase, ScanCase
from pallas_kernels.ssm_update.shapes import SsmShape

MASKS = {"full": (None, None), "window": (5, None), "chunk": (None, 8), "both": (7, 16)}
WIDTHS = {"bfloat16": 2, "float32": 4, "int8": 1}
# Bytes of states that are read and written, over those written.
MOVED = {"decode": 2, "drafts": 1.25, "prefill": 1}


def small_case(case_type: type[Case], kind: str, shape: Any, dtype: str = "bfloat16") -> Case:
    given = {"platform": "gpu", "page": 4, "dtype": dtype, "q_dtype": "float32" if dtype == "float32" else "bfloat16"}
    return of_step(case_type, shape, kind, Step(small=True), **given)


def seen_by(position: int, mask: MaskRule) -> set[int]:
    window, chunk = mask.sliding_window, mask.attention_chunk_size
    return {
        key
        for key in range(position + 1)
        if (window is None or position - key < window) and (chunk is None or key // chunk == position // chunk)
    }


def counted(rows: Rows, mask: MaskRule, heads: int, query_bytes: int, token_bytes: int, products: int) -> Work:
    """`products`: multiplications and additions of a head and key."""
    num_bytes = flops = 0
    for q_len, length in rows:
        keys: set[int] = set()
        for position in range(length - q_len, length):
            keys |= seen_by(position, mask)
            for _ in range(heads):
                num_bytes += query_bytes
                flops += sum(products for _ in seen_by(position, mask))
        num_bytes += sum(token_bytes for _ in keys)
    return Work(num_bytes, flops)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", sorted(SMALL_ROWS))
@pytest.mark.parametrize("dtype", WIDTHS)
def test_attention(kind: str, mask: str, dtype: str) -> None:
    shape = AttentionShape("x", "x", 6, 2, 8, *MASKS[mask])
    found = small_case(AttentionCase, kind, shape, dtype)
    query = 2 * 8 * WIDTHS["float32" if dtype == "float32" else "bfloat16"]  # read, and the output written
    token = 2 * 2 * 8 * WIDTHS[dtype]
    assert found.work == counted(SMALL_ROWS[kind], MaskRule(True, *MASKS[mask]), 6, query, token, 2 * 8 + 2 * 8)


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_latent_attention(kind: str) -> None:
    shape = LatentShape("x", "x", 3, latent_dim=8, rope_dim=4)
    found = small_case(LatentCase, kind, shape)
    query = 2 * (8 + 4) + 2 * 8
    assert found.work == counted(SMALL_ROWS[kind], MaskRule(), 3, query, 2 * (8 + 4), 2 * (8 + 4) + 2 * 8)


@pytest.mark.parametrize("mask", MASKS)
def test_the_pages_of_a_step_hold_what_is_seen_and_no_more(mask: str) -> None:
    rule = MaskRule(True, *MASKS[mask])
    step = steps.Step(SMALL_ROWS["mixed"], rule, 4)
    tables, lengths, starts, distribution = (np.asarray(a) for a in step.arrays(np.random.default_rng(0)))
    assert np.diff(starts).tolist() == [q for q, _ in step.rows]
    assert lengths.tolist() == [n for _, n in step.rows]
    assert distribution.tolist() == [2, 2, 3]
    used = tables[tables > 0].tolist()
    assert sorted(used) == list(range(1, step.num_pages))
    for table, (q_len, length) in zip(tables, step.rows, strict=True):
        seen = {key // 4 for position in range(length - q_len, length) for key in seen_by(position, rule)}
        assert set(np.flatnonzero(table)) == seen


def total_bytes(arrays: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("op", ["kv_write", "latent_write"])
def test_a_write_reads_its_tokens_and_changes_as_many_bytes(op: str, kind: str) -> None:
    if op == "kv_write":
        found = small_case(WriteCase, kind, AttentionShape("x", "x", 6, 2, 8))
    else:
        found = small_case(LatentWriteCase, kind, LatentShape("x", "x", 3, 8, 4))
    pages, rest = found.arguments(0)
    slots = np.asarray(rest[2])
    assert len(set(slots.tolist())) == len(slots)
    assert slots.min() >= 4  # never the null page
    (_, written) = found.call("reference", pages, rest)
    assert found.work == Work(total_bytes(rest[:2]) + changed_bytes(pages, written), 0)


@pytest.mark.parametrize("kind", MOVES)
def test_page_ops(kind: str) -> None:
    found = small_case(MoveCase, kind, AttentionShape("x", "x", 6, 2, 8))
    pages, rest = found.arguments(0)
    outs, written = found.call("reference", pages, rest)
    moved = total_bytes(outs) if kind == "gather" else changed_bytes(pages, written)
    assert found.work == Work(moved if kind == "zero" else 2 * moved, 0)


def changed_bytes(pages: tuple, written: tuple) -> int:
    """Of the rows of heads that differ; random ones are never equal."""
    rows = 0
    for before, after in zip(pages, written, strict=True):
        rows += int((np.asarray(before) != np.asarray(after)).any(-1).sum()) * before.shape[-1] * before.dtype.itemsize
    return rows


@pytest.mark.parametrize("num_parts", [2, 8])
def test_merge_states(num_parts: int) -> None:
    found = small_case(MergeCase, f"{num_parts} parts", AttentionShape("x", "x", 6, 2, 8))
    pages, rest = found.arguments(0)
    flops = sum(2 for _ in np.ndindex(rest[0].shape))  # a weight times a number, added
    assert found.work == Work(total_bytes(rest) + total_bytes(found.call("reference", pages, rest)), flops)


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("head_dim", [None, 4])
def test_a_scan(kind: str, head_dim: int | None) -> None:
    found = small_case(ScanCase, kind, SsmShape("x", "x", 4, 8, head_dim, num_groups=2 if head_dim else 1))
    pages, rest = found.arguments(0)
    outs, written = found.call("reference", pages, rest)
    flops = 0
    for _ in np.ndindex(outs.shape):  # a token, a head and a number of it
        for _ in range(8):
            flops += 5
    states = changed_bytes(pages, written)
    num_bytes = total_bytes(rest[0]) + total_bytes(outs) + int(states * MOVED[kind])
    assert found.work == Work(num_bytes, flops)


@pytest.mark.parametrize("kind", MOVED)
def test_a_convolution(kind: str) -> None:
    found = small_case(ConvCase, kind, SsmShape("x", "x", 4, 8, num_taps=3))
    pages, rest = found.arguments(0)
    outs, written = found.call("reference", pages, rest)
    flops = sum(2 * 3 for _ in np.ndindex(outs.shape))
    states = changed_bytes(pages, written)
    num_bytes = total_bytes(rest[0]) + total_bytes(outs) + int(states * MOVED[kind])
    assert found.work == Work(num_bytes, flops)


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("is_per_channel", [False, True])
def test_a_gated_delta_rule(kind: str, is_per_channel: bool) -> None:
    found = small_case(DeltaCase, kind, DeltaShape("x", "x", 2, 4, 3, 5, is_per_channel=is_per_channel))
    pages, rest = found.arguments(0)
    outs, written = found.call("reference", pages, rest)
    flops = 0
    for _ in np.ndindex(outs.shape):  # a token, a head and a number of its value
        for _ in range(3):
            flops += 1 + 2 + 2 + 2
    states = changed_bytes(pages, written)
    num_bytes = total_bytes(rest[0]) + total_bytes(outs) + int(states * MOVED[kind])
    assert found.work == Work(num_bytes, flops)
