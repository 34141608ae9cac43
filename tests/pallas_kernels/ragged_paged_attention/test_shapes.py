"""The list of real model shapes, each once through the op at one shard of eight."""

from __future__ import annotations

import pytest

from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from tests.pallas_kernels.cases import Shape, assert_matches_oracle, make_case


def test_names_are_unique_and_heads_divide() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    for shape in SHAPES:
        assert shape.num_q_heads % shape.num_kv_heads == 0
        assert shape.per_shard(1) == (shape.num_q_heads, shape.num_kv_heads)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            shape.name, marks=() if shape.name in ("gpt-oss-120b-local", "gemma3-27b-local") else pytest.mark.sweep
        )
        for shape in SHAPES
    ],
)
def test_model_shape(name: str) -> None:
    """bfloat16 queries over packed bfloat16 pages of 16, a decode and a prefill row."""
    (model,) = (shape for shape in SHAPES if shape.name == name)
    num_q_heads, num_kv_heads = model.per_shard(8)
    shape = Shape(
        num_tokens=9,
        num_rows=2,
        num_columns=20,
        page_size=16,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=model.head_dim,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        platform="tpu",
    )
    options = Options(
        sm_scale=model.sm_scale,
        sliding_window=model.sliding_window,
        attention_chunk_size=model.attention_chunk_size,
        soft_cap=model.soft_cap,
        sinks=[0.5] * num_q_heads if model.sinks else None,
    )
    assert_matches_oracle(make_case(0, shape, [(1, 300), (8, 170)], options), options)


def test_scale_of_the_logits() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    assert by_name["llama3-8b"].sm_scale == 128**-0.5
    assert by_name["gemma3-27b-local"].sm_scale == 168**-0.5


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    shape = AttentionShape("some", "nobody/nothing", 64, 4, 128)
    assert shape.per_shard(2) == (32, 2)
    assert shape.per_shard(8) == (8, 1)


@pytest.mark.parametrize("num_shards", [0, 3, 5, 128])
def test_shards_that_do_not_divide(num_shards: int) -> None:
    with pytest.raises(ValueError, match=f"some: expected shards that divide 64 query heads .* got {num_shards}"):
        AttentionShape("some", "nobody/nothing", 64, 4, 128).per_shard(num_shards)
