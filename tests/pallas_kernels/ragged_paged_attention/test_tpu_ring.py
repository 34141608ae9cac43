"""Laws of the ring of KV buffers: whatever sequences follow each other, and however many blocks are under way."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.kernel_tpu import Tuning
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.ragged_paged_attention.tpu_plan import ring_buffers
from tests.pallas_kernels.cases import Case, Shape, make_case
from tests.pallas_kernels.ragged_paged_attention.test_kernel_tpu import assert_right, compiled

# Every three of empty, short and long follow each other somewhere: a de Bruijn sequence, and its first two again.
ORDER = "00010020110120210221112122200"
LENGTHS = {"0": 0, "1": 40, "2": 700}  # long: six blocks, the last of them cut
SHAPE = Shape(
    num_tokens=len(ORDER), num_rows=len(ORDER), num_columns=44, page_size=16, num_q_heads=2, num_kv_heads=1,
    head_dim=128, q_dtype="bfloat16", kv_dtype="bfloat16", platform="tpu",
)  # fmt: skip
OPTIONS = Options(sinks=np.array([0.5, -1.0], np.float32))


def test_the_order_has_every_three_lengths() -> None:
    """Of the other tests' case."""
    assert len({ORDER[i : i + 3] for i in range(len(ORDER) - 2)}) == 27


@functools.cache
def every_order(is_reversed: bool) -> Case:
    """One token of each sequence, lengths as in ORDER; NaN in every slot that no query sees."""
    lengths = [LENGTHS[kind] for kind in ORDER]
    return make_case(3, SHAPE, [(1, n) for n in (reversed(lengths) if is_reversed else lengths)], OPTIONS)


@pytest.mark.parametrize(
    ("buffers", "tables_in_hbm"),
    [
        (4, True),
        *(pytest.param(*choice, marks=pytest.mark.sweep) for choice in ((2, False), (2, True), (3, False), (8, False))),
    ],
)
def test_sequences_may_follow_each_other_in_any_order(buffers: int, tables_in_hbm: bool) -> None:
    """Right, without a race, in an order and in its reverse."""
    tuning = Tuning(decode_block=128, decode_buffers=buffers)
    run = compiled(SHAPE, OPTIONS, tuning, tables_in_hbm)
    for is_reversed in (False, True):
        case = every_order(is_reversed)
        assert_right(run(*case.arrays), case, OPTIONS)


@pytest.mark.parametrize("buffers", [4, pytest.param(2, marks=pytest.mark.sweep)])
def test_tiles_may_follow_each_other_in_any_order(buffers: int) -> None:
    """Tiles of sequences of one block and of many, more of them than buffers."""
    shape = Shape(
        num_tokens=44, num_rows=8, num_columns=32, page_size=16, num_q_heads=2, num_kv_heads=1,
        head_dim=128, q_dtype="bfloat16", kv_dtype="bfloat16", platform="tpu",
    )  # fmt: skip
    run = compiled(shape, Options(), Tuning(queries=8, tile_block=128, tile_buffers=buffers))
    for rows in ([(2, 2), (3, 500), (9, 9), (12, 400), (2, 300), (16, 16)], [(17, 512), (2, 3), (2, 2), (5, 5)]):
        case = make_case(5, shape, rows)
        assert_right(run(*case.arrays), case, Options())


def test_buffers_fill_vmem_but_no_more_than_hides_the_latency() -> None:
    """Powers of two: 4 MiB beside two blocks, if the room allows."""
    assert [ring_buffers(size << 20, 12 << 20) for size in (1, 2, 3, 4, 5, 6)] == [8, 4, 4, 2, 2, 2]
    assert [ring_buffers(size << 20, 64 << 20) for size in (1, 2, 3, 4, 5, 6)] == [8, 4, 4, 4, 4, 4]
    assert ring_buffers(1 << 18, 12 << 20) == 8
