"""Latent attention of a few queries a sequence on the GPU's split-KV path, as drafts make them, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.gpu.plan import Field
from pallas_kernels.gpu.tiles import tile_shape
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import kernel_gpu, mla_paged_attention, plan
from pallas_kernels.mla_paged_attention.gpu_schedule import most_queries
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_right, nan_behind
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, make_case

Rows = list[tuple[int, int]]  # (queries, keys) of each sequence
SMALL = kernel_gpu.Tuning(stages=2, num_blocks=3)
SHAPE = Shape(
    num_tokens=20, num_rows=4, num_columns=18, num_q_heads=6, rope_dim=64, q_dtype="bfloat16",
    latent=LatentShape(head_dim=192, page_size=16, dtype="bfloat16"),
)  # fmt: skip
RAGGED = [(5, 140), (1, 5), (3, 70)]  # pieces that end within a sequence; a mask that cuts several blocks
BLIND = [(2, 270), (5, 3), (4, 129)]  # queries before position 0
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one tile a sequence": ({}, {}),
    "three tiles a sequence": ({"num_q_heads": 24}, {}),
    "window, sink tokens, soft cap, sinks": (
        {"num_q_heads": 24},
        {"sliding_window": 70, "num_sink_tokens": 19, "soft_cap": 1.5},
    ),
    "a tile a query and half of the heads, chunk, sinks": (
        {"num_q_heads": 66, "num_tokens": 12, "num_rows": 3},
        {"attention_chunk_size": 66},
    ),
    "not causal, int8": (
        {"num_q_heads": 24, "latent": replace(SHAPE.latent, dtype="int8")},
        {"causal": False, "sliding_window": 90, "sm_scale": 0.002},
    ),
}


def planned(shape: Shape, options: Options, *, is_decode: bool) -> Callable[..., Any]:
    """(arrays of a case) -> (out, lse) of the op with a plan."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)
    static = {
        "sm_scale": options.sm_scale, "causal": options.causal, "sliding_window": options.sliding_window,
        "attention_chunk_size": options.attention_chunk_size, "num_sink_tokens": options.num_sink_tokens,
        "soft_cap": options.soft_cap, "return_lse": True, "backend": "gpu",
    }  # fmt: skip
    given = {name: getattr(options, name) for name in ("sinks", "k_scale")}
    arrays = {name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}

    def call(*step: Any) -> Any:
        schedule = plan(*step, mask, is_decode=is_decode, backend="gpu")
        assert schedule.sizes.is_decode == is_decode
        assert schedule.sizes.queries == shape.num_tokens // shape.num_rows
        result = mla_paged_attention(*step, **static, **arrays, schedule=schedule)
        return result.out, result.lse

    return compile_on_gpu(call, *make_case(0, shape, [], Options()).arrays)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than stages, and thread blocks that share sequences."""
    for name in ("plan", "mla_paged_attention"):
        monkeypatch.setattr(kernel_gpu, name, functools.partial(getattr(kernel_gpu, name), tuning=SMALL))


STEPS = [RAGGED, pytest.param(BLIND, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("rows", STEPS, ids=["ragged", "blind"])
@pytest.mark.parametrize(
    "name",
    [name if name == "three tiles a sequence" else pytest.param(name, marks=pytest.mark.sweep) for name in FEATURES],
)
def test_a_step_of_few_queries_equals_the_oracle(name: str, rows: Rows) -> None:
    """Ragged, with fewer sequences than rows, padding behind them; queries before position 0 see nothing."""
    change, mask = FEATURES[name]
    shape = replace(SHAPE, **change)
    most = shape.num_tokens // shape.num_rows
    sinks = np.linspace(-1, 2, shape.num_q_heads) if "sinks" in name else None
    options = Options(**({"sm_scale": 0.1} | mask), sinks=sinks, k_scale=0.7, v_scale=0.7)
    own = [(min(q_len, most), length) for q_len, length in rows]
    case = nan_behind(make_case(len(rows), shape, own, options))
    assert_right(planned(shape, options, is_decode=True)(*case.arrays), case.expected(options), shape.q_dtype)


MIXED = [
    [(0, 7), (5, 70), (9, 40)],  # a row without queries, a tile behind those that decode
    pytest.param([(1, 130), (12, 40), (3, 70), (1, 66)], marks=pytest.mark.sweep),
    pytest.param(RAGGED, marks=pytest.mark.sweep),
]


@pytest.mark.parametrize("rows", MIXED, ids=str)
@pytest.mark.parametrize("num_heads", [24, pytest.param(6, marks=pytest.mark.sweep)])
def test_few_queries_among_longer_sequences_equal_the_oracle(num_heads: int, rows: Rows) -> None:
    """Also a step of few alone, planned as one that may be mixed."""
    shape = replace(SHAPE, num_q_heads=num_heads, num_tokens=23)
    options = Options(sm_scale=0.1, sliding_window=70)
    case = nan_behind(make_case(0, shape, rows, options))
    assert_right(planned(shape, options, is_decode=False)(*case.arrays), case.expected(options), shape.q_dtype)


def test_as_many_queries_as_pieces_may_be() -> None:
    """With 16 heads four queries stand in a tile; with 128 each stands in two of its own, and pieces are few."""
    one, two = (tile_shape(16), 1), (tile_shape(128), 2)
    assert [most_queries(t, 64, *one) for t in (64, 256, 512, 8192)] == [1, 4, 8, 1]
    assert [most_queries(t, 64, *two) for t in (64, 128, 256, 512, 8192)] == [1, 2, 4, 4, 1]
    assert [most_queries(8 * n, n, *two) for n in (1, 16, 256, 1024)] == [8, 8, 1, 1]


def test_pieces_of_a_sequence_name_it_whatever_tile_they_are_of() -> None:
    """Tables are rows of sequences, query tiles are counted apart; each tile ends at the key of its last query."""
    shape = replace(SHAPE, num_q_heads=24)
    case = make_case(0, shape, [(5, 270), (4, 200)], Options())
    schedule = plan(*case.arrays, MaskRule(), is_decode=True, backend="gpu")
    pieces, tiles, blocks = (np.asarray(x) for x in (schedule.pieces, schedule.tiles, schedule.blocks))
    seen: dict[int, list[int]] = {}
    for piece in (piece for first, end in blocks for piece in range(first, end)):
        seq, tile = int(pieces[piece, Field.SEQ]), int(tiles[piece])
        assert seq == tile // 3
        assert pieces[piece, Field.POS] == case.seq_lens[seq] - np.diff(case.query_start_loc)[seq] + 2 * (tile % 3)
        seen.setdefault(tile, []).extend(range(pieces[piece, Field.FIRST], pieces[piece, Field.END]))
    keys = {0: 267, 1: 269, 2: 270, 3: 198, 4: 200}  # two queries a tile; the fifth stands alone
    assert seen == {tile: list(range(-(-(-(-count // 16) * 16) // 64))) for tile, count in keys.items()}
