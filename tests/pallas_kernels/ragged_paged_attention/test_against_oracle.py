"""The op against the float64 oracle: random ragged steps, all features crossed pairwise, NaN wherever unseen."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pallas_kernels.cases.pages import whole_rows
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import Shape, assert_matches_oracle, every_level, make_case, pairwise

MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 5},
    {"attention_chunk_size": 8},
    {"sliding_window": 3, "num_sink_tokens": 6},
    {"causal": False},
)
MORE_MASKS = (
    {"sliding_window": 1},
    {"sliding_window": 1000},
    {"attention_chunk_size": 1},
    {"attention_chunk_size": 7, "sliding_window": 4, "num_sink_tokens": 1},
    {"causal": False, "sliding_window": 9},
    {"causal": False, "attention_chunk_size": 6, "num_sink_tokens": 2},
    {"num_sink_tokens": 3},
)
CACHES: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "float32"},
    {"kv_dtype": "float8_e4m3fn"},
    {"kv_dtype": "bfloat16", "platform": "tpu"},
    {"kv_dtype": "int8", "platform": "tpu"},
)
MORE_CACHES = (
    {"kv_dtype": "float16"},
    {"kv_dtype": "bfloat16"},
    {"kv_dtype": "float8_e5m2"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "float32", "platform": "tpu"},
    {"kv_dtype": "float8_e4m3fn", "platform": "tpu"},
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": MASKS,
    "cache": CACHES,
    "sizes": (
        {"page_size": 4},
        {"page_size": 1},
        {"page_size": 5, "num_tokens": 40},
        {"page_size": 64, "num_columns": 3},
    ),
    "heads": ((4, 2), (3, 3), (6, 1)),
    "head_dim": (16, (8, 24)),
    "q_dtype": ("float32", "bfloat16"),
    "soft_cap": (None, 1.5),
    "sinks": (False, True),
    "scales": (None, "scalar", "per_head"),
}
MORE_FACTORS = FACTORS | {
    "mask": MASKS + MORE_MASKS,
    "cache": CACHES + MORE_CACHES,
    "sizes": tuple(
        {"page_size": p, "num_columns": c, "num_tokens": t, "num_rows": s}
        for p, c, t, s in (
            (1, 48, 24, 5),
            (2, 150, 300, 9),
            (3, 16, 1, 1),
            (16, 20, 64, 3),
            (33, 2, 7, 7),
            (64, 5, 256, 4),
        )
    ),
    "heads": ((4, 2), (3, 3), (6, 1), (16, 2), (1, 1), (10, 5)),
    "head_dim": (16, (8, 24), 96, 1),
    "q_dtype": ("float32", "bfloat16", "float16"),
}


def shape_and_options(choice: dict[str, Any], seed: int) -> tuple[Shape, Options]:
    """The static shape and the options of one choice of levels."""
    rng = np.random.default_rng(seed)
    cache, (num_q_heads, num_kv_heads) = choice["cache"], choice["heads"]
    dims = choice["head_dim"] if isinstance(choice["head_dim"], tuple) else (choice["head_dim"], choice["head_dim"])
    shape = Shape(
        **{**choice["sizes"], **cache},
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dims[0],
        head_dim_v=None if cache.get("platform") == "tpu" else dims[1],
        q_dtype=choice["q_dtype"],
    )
    page_size = whole_rows(shape.page_size, num_kv_heads, shape.kv_dtype, shape.platform)
    shape = dataclasses.replace(shape, page_size=page_size)
    small = 1 / 64 if shape.kv_dtype == "int8" else 1.0  # int8 pages hold values 64 times larger
    scale_shape = {None: None, "scalar": (), "per_head": (num_kv_heads,)}[choice["scales"]]
    k_scale, v_scale = (
        None if scale_shape is None else rng.uniform(0.3, 1.7, scale_shape).astype(np.float32) for _ in range(2)
    )
    sinks = rng.standard_normal(num_q_heads).astype(np.float32) * 3 if choice["sinks"] else None
    if sinks is not None and num_q_heads > 1:
        sinks[-1] = -np.inf
    options = Options(
        sm_scale=0.3 * small,
        soft_cap=choice["soft_cap"],
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        **choice["mask"],
    )
    return shape, options


CHOICES = pairwise(FACTORS)
ALWAYS = every_level(CHOICES)


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=() if i in ALWAYS else pytest.mark.sweep) for i in range(len(CHOICES))]
)
def test_every_pair_of_features(index: int) -> None:
    """Each choice of features over several ragged steps, the empty one among them.

    By default choices in which every level of every feature occurs, with every pair of them only in a sweep.
    """
    shape, options = shape_and_options(CHOICES[index], index)
    assert_matches_oracle(make_case(0, shape, [], options), options)
    for seed in range(4):
        assert_matches_oracle(make_case(100 * index + seed, shape, None, options), options)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(6))
def test_sweep(seed: int) -> None:
    """More levels of every feature, larger steps, several tables of choices."""
    for index, choice in enumerate(pairwise(MORE_FACTORS, seed)):
        shape, options = shape_and_options(choice, 1000 * seed + index)
        for step in range(4):
            assert_matches_oracle(make_case(10_000 * seed + 100 * index + step, shape, None, options), options)


def test_pairs_are_all_there() -> None:
    """The choices hold every pair of levels."""
    chosen = pairwise({"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3)})
    for x, y, pairs in (("a", "b", 6), ("a", "c", 12), ("b", "c", 8)):
        assert len({(choice[x], choice[y]) for choice in chosen}) == pairs
    assert len(chosen) <= 16
