"""Sparse latent attention against the float64 oracle, and its laws."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.latent_entries import LatentFp8
from pallas_kernels.latent_write import latent_write
from pallas_kernels.sparse_mla_attention import plan, sparse_mla_attention
from pallas_kernels.sparse_mla_attention.shapes import SHAPES
from tests.pallas_kernels.cases import random_values
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Shape, assert_matches_oracle, make_case, run

FP8 = LatentFp8(rope_dim=8, group=8)
FP8_WIDTH = FP8.width(24)


def test_a_schedule_serves_all_layers_of_a_kind() -> None:
    """Equal bits with the schedule planned before the layers."""
    case = make_case(5, Shape(ratio=4, topk=5), [(1, 30), (1, 1), (11, 40), (6, 6)])
    schedule = plan(*case.step, num_tokens=24, sliding_window=5, page_size=4)
    result, planned = run(case, None), run(case, None, schedule=schedule)
    chex.assert_trees_all_equal((result.out, result.lse), (planned.out, planned.lse), strict=True)


def test_window_slots() -> None:
    """The slots of positions max(0, pos - W + 1) ... pos, then -1; nothing for padding."""
    tables = jnp.array([[3, 1, 2], [5, 0, 0]], jnp.int32)
    step = (tables, jnp.int32([9, 2]), jnp.int32([0, 2, 4]), jnp.int32([0, 0, 2]))
    schedule = plan(*step, num_tokens=5, sliding_window=3, page_size=4)
    assert schedule.seq.tolist()[:4] == [0, 0, 1, 1]
    assert schedule.pos.tolist() == [7, 8, 0, 1, -1]
    expected = [[5, 6, 7], [6, 7, 8], [20, -1, -1], [20, 21, -1], [-1, -1, -1]]
    assert schedule.window_slots.tolist() == expected
    assert schedule.num_window_slots.tolist() == [3, 3, 1, 2, 0]
    assert schedule.num_entries(4).tolist() == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_without_a_window_the_picks_alone_are_seen(has_sinks: bool) -> None:
    """Holes and tokens of the future among them; a token that names nothing gives 0."""
    sinks = np.array([0.5, -np.inf, 3.0]) if has_sinks else None
    for seed in range(3):
        assert_matches_oracle(make_case(seed, Shape(window=0, ratio=1, topk=3)), sinks)


def test_unnamed_rows_of_padding_have_no_tokens() -> None:
    """Rows after the last real one are padding whatever their starts say."""
    step = (jnp.ones((3, 2), jnp.int32), jnp.int32([2, 3, 3]), jnp.int32([0, 2, 3, 4]), jnp.int32([0, 0, 1]))
    assert plan(*step, num_tokens=5, sliding_window=2, page_size=4).pos.tolist() == [0, 1, -1, -1, -1]


def test_new_kv_is_what_latent_write_writes() -> None:
    """The write in the op and a write apart give equal bits, pages included."""
    shape = Shape(num_tokens=6, num_rows=1, entries=FP8, latent=LatentShape(FP8_WIDTH, 4, "int8"))
    case = make_case(4, shape, [(6, 6)])
    new = jnp.asarray(random_values(np.random.default_rng(0), (6, 24), "float32"))
    slots = jnp.asarray(case.step[0][0, np.arange(6) // 4] * 4 + np.arange(6) % 4)
    fused = run(case, None, new_kv=new, slot_mapping=slots)
    pages = latent_write(new, (jnp.asarray(case.page),), slots, entries=FP8, page_size=4)
    options = {"sm_scale": shape.sm_scale, "sliding_window": 5, "entries": FP8}
    apart = sparse_mla_attention(jnp.asarray(case.q), pages, *(jnp.asarray(x) for x in case.step), **options)
    np.testing.assert_array_equal(fused.out, apart.out)
    np.testing.assert_array_equal(fused.pages[0], pages[0])
    assert apart.lse is None


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        pytest.param(
            model.name, ratio, marks=() if (model.name, ratio) == ("deepseek-v4-flash", 4) else pytest.mark.sweep
        )
        for i, model in enumerate(SHAPES)
        for ratio in (0, *model.ratios)
    ],
)
def test_model_shape(name: str, ratio: int) -> None:
    """bfloat16 queries over fp8 entries, one shard of sixteen, for each kind of layer; a decode and a prefill row."""
    (model,) = (shape for shape in SHAPES if shape.name == name)
    entries = LatentFp8(model.rope_dim)
    shape = Shape(
        num_tokens=9,
        num_rows=2,
        num_columns=8,
        num_q_heads=model.per_shard(16),
        dim=model.dim,
        q_dtype="bfloat16",
        window=model.sliding_window,
        ratio=ratio or None,
        topk=model.topk if ratio == 4 else None,
        entries=entries,
        latent=LatentShape(entries.width(model.dim), 64, "int8"),
        entry_page_size=256 // (ratio or 256),
    )
    assert model.sm_scale == shape.sm_scale
    assert_matches_oracle(make_case(0, shape, [(1, 400), (8, 170)]), np.full(shape.num_q_heads, 0.5))


def test_shards_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="deepseek-v4-flash: expected shards that divide 64 query heads, got 3"):
        {model.name: model for model in SHAPES}["deepseek-v4-flash"].per_shard(3)
