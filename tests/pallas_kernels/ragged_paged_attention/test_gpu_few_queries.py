"""Sequences of a few queries on the GPU's split-KV path, as steps with drafts have them, against the float64 oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.kv import KVRing
from pallas_kernels.gpu.plan import Field, GpuConfig, plan_decode
from pallas_kernels.interpret.on_gpu import compile_on_gpu, gpu_device
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_gpu, plan, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.gpu_schedule import most_queries
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.schedule import Batch
from tests.pallas_kernels.cases import Shape, assert_right, make_case, nan_behind

Rows = list[tuple[int, int]]  # (queries, keys) of each sequence
SMALL = kernel_gpu.Tuning(decode_block=64, decode_stages=2, num_blocks=3, prefill_block=64, prefill_stages=2)
SHAPE = Shape(
    num_tokens=32, num_rows=4, num_columns=18, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=64,
    q_dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip
RAGGED = [(8, 270), (1, 5), (3, 70)]  # pieces that end within a sequence; a mask that cuts several blocks
BLIND = [(2, 140), (7, 4), (5, 129)]  # queries before position 0
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "group 1": ({"num_q_heads": 2}, {}),
    "group 8, window and sink tokens, soft cap": (
        {"num_q_heads": 8, "num_kv_heads": 1, "q_dtype": "float16", "kv_dtype": "float16"},
        {"sliding_window": 70, "num_sink_tokens": 19, "soft_cap": 1.5},
    ),
    "group 5, chunk, int8": (
        {"num_q_heads": 5, "num_kv_heads": 1, "page_size": 8, "num_columns": 36, "kv_dtype": "int8"},
        {"attention_chunk_size": 66, "sm_scale": 0.002},
    ),
    "float8, pages larger than blocks": (
        {"page_size": 128, "num_columns": 3, "kv_dtype": "float8_e4m3fn"},
        {"sliding_window": 3},
    ),
    "not causal": ({}, {"causal": False, "sliding_window": 90}),
    "all seen": ({}, {"causal": False}),
}


def planned(shape: Shape, options: Options, *, is_decode: bool) -> Callable[..., Any]:
    """(arrays of a case) -> (out, lse) of the op with a plan."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)
    static = {
        "sm_scale": options.sm_scale, "causal": options.causal, "sliding_window": options.sliding_window,
        "attention_chunk_size": options.attention_chunk_size, "num_sink_tokens": options.num_sink_tokens,
        "soft_cap": options.soft_cap, "num_kv_heads": shape.num_kv_heads, "return_lse": True, "backend": "gpu",
    }  # fmt: skip
    given = {name: getattr(options, name) for name in ("sinks", "k_scale", "v_scale")}
    arrays = {name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}

    def call(q: jax.Array, pages: Any, *step: jax.Array) -> Any:
        sizes: dict[str, Any] = {"num_kv_heads": shape.num_kv_heads, "is_decode": is_decode, "backend": "gpu"}
        schedule = plan(q, pages, *step, mask, **sizes)
        result = ragged_paged_attention(q, pages, *step, **static, **arrays, schedule=schedule)
        return result.out, result.lse

    return compile_on_gpu(call, *make_case(0, shape, []).arrays)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than stages, as small as they can be."""
    for name in ("plan", "ragged_paged_attention"):
        monkeypatch.setattr(kernel_gpu, name, functools.partial(getattr(kernel_gpu, name), tuning=SMALL))


@pytest.mark.parametrize(
    "name",
    [name if name == "group 5, chunk, int8" else pytest.param(name, marks=pytest.mark.sweep) for name in FEATURES],
)
def test_a_step_of_few_queries_equals_the_oracle(name: str) -> None:
    """Ragged, with fewer sequences than rows, padding behind them; queries before position 0 see nothing."""
    change, mask = FEATURES[name]
    shape = replace(SHAPE, **change)
    options = Options(**mask, sinks=np.linspace(-1, 2, shape.num_q_heads), k_scale=0.7, v_scale=1.3)
    run = planned(shape, options, is_decode=True)
    for seed, rows in enumerate((RAGGED, BLIND)):
        case = nan_behind(make_case(seed, shape, rows, options))
        assert_right(run(*case.arrays), case.expected(options), shape.q_dtype)


def test_few_queries_among_longer_sequences_equal_the_oracle() -> None:
    """A lone query that does not decode, a row without queries, tiles behind them; also a step of few alone."""
    shape, options = replace(SHAPE, num_tokens=20), Options(sliding_window=70, sinks=(0.5, -1.0, 2.0, -np.inf))
    run = planned(shape, options, is_decode=False)
    for seed, rows in enumerate(([(0, 7), (5, 133), (9, 40)], [(1, 130), (12, 40), (3, 70), (1, 66)], RAGGED)):
        case = nan_behind(make_case(seed, shape, rows, options))
        assert_right(run(*case.arrays), case.expected(options), shape.q_dtype)


def test_a_step_of_any_lengths_is_shared_out() -> None:
    """A block belongs to one piece, and whole ones are seen whole by every query."""
    config = GpuConfig(MaskRule(sliding_window=100), None, 1, 4, 64, 64, 16, "bfloat16", "bfloat16", 64, 2, queries=8)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        lens, q_lens = rng.integers(1, 500, 6), rng.integers(0, 9, 6)
        batch = Batch(*(np.asarray(x, np.int32) for x in (lens, np.zeros(6), q_lens)))
        pieces, blocks, _ = (np.asarray(x) for x in jax.jit(plan_decode, static_argnums=(1, 2))(batch, config, 3))
        done: list[list[int]] = [[] for _ in lens]
        for piece in (piece for first, end in blocks for piece in range(first, end)):
            own = pieces[piece]
            done[own[Field.SEQ]] += range(own[Field.FIRST], own[Field.END])
            assert own[Field.POS] == lens[own[Field.SEQ]] - q_lens[own[Field.SEQ]]
            last = own[Field.SEQ_LEN] - 1
            for block in range(own[Field.WHOLE], own[Field.WHOLE_END]):
                first_key = block * 64 + own[Field.SHIFT] * 16
                assert last - 99 <= first_key
                assert first_key + 63 <= own[Field.POS]
        for seq, found in enumerate(done):
            first_page = max(lens[seq] - q_lens[seq] - 99, 0) // 16
            pages = -(-lens[seq] // 16) - first_page if q_lens[seq] else 0
            assert found == list(range(-(-pages * 16 // 64)))


def test_as_many_queries_as_fill_a_tile() -> None:
    """64 rows are the query heads of a KV head times tokens; among long sequences only lone queries decode."""
    assert [most_queries(t, 64, 8) for t in (64, 128, 512, 576, 8192)] == [1, 2, 8, 1, 1]
    assert [most_queries(256, 64, group) for group in (1, 16, 32, 64)] == [4, 4, 2, 1]


@pytest.mark.skipif(gpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("wait", ["wait_free", pytest.param("wait_full", marks=pytest.mark.sweep)])
def test_a_missing_wait_is_found(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reports a race, or a barrier that nobody observed."""
    monkeypatch.setattr(KVRing, wait, lambda *_: None)
    run = planned(SHAPE, Options(), is_decode=True)
    with pytest.raises(Exception, match=r"race|observed|phase"):
        run(*make_case(9, SHAPE, RAGGED).arrays)
