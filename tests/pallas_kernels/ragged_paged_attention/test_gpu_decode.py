"""The GPU's decode kernel against the float64 oracle: features, NaN wherever unseen, races; its plan by counting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import kernel_gpu
from pallas_kernels.ragged_paged_attention.gpu_kv import KVRing
from pallas_kernels.ragged_paged_attention.gpu_plan import Field, GpuConfig, Keys, plan_decode
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from tests.pallas_kernels.cases import Case, Shape, assert_close, make_case, pairwise
from tests.pallas_kernels.on_gpu import compile_on_gpu, gpu_device
from tests.pallas_kernels.oracle import Options
from tests.pallas_kernels.ragged_paged_attention.test_against_oracle import shape_and_options

SMALL = kernel_gpu.Tuning(decode_block=64, decode_stages=2, num_blocks=3)
SHAPE = Shape(
    num_tokens=3, num_rows=3, num_columns=18, page_size=16, num_q_heads=2, num_kv_heads=1, head_dim=64,
    q_dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip
ROWS = [(1, 270), (1, 5), (1, 130)]  # more blocks than stages; pieces that end within a sequence
BLOCKS = {
    "full": ({}, {}),
    "window and sink tokens": ({}, {"sliding_window": 70, "num_sink_tokens": 19, "soft_cap": 1.5}),
    "chunk": ({"page_size": 8, "num_columns": 36}, {"attention_chunk_size": 96}),
    "pages larger than blocks": ({"page_size": 128, "num_columns": 3}, {"sliding_window": 100}),
    "float8": ({"kv_dtype": "float8_e4m3fn", "num_q_heads": 4, "num_kv_heads": 2}, {"sliding_window": 70}),
    "int8": ({"kv_dtype": "int8", "head_dim": 96}, {"soft_cap": 2.0, "sm_scale": 0.002}),
    "float16": ({"q_dtype": "float16", "kv_dtype": "float16", "head_dim": 80, "head_dim_v": 64}, {}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": (
        {},
        {"sliding_window": 37},
        {"attention_chunk_size": 100},
        {"sliding_window": 65, "num_sink_tokens": 70},
        {"causal": False, "num_sink_tokens": 3},
    ),
    "cache": tuple({"kv_dtype": name} for name in ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")),
    "sizes": tuple(
        {"page_size": page, "num_columns": 320 // page, "num_tokens": 6, "num_rows": 6} for page in (8, 16, 32, 64, 128)
    ),
    "heads": ((2, 1), (6, 2), (9, 1)),
    "head_dim": (64, 96, (128, 96), 256),
    "q_dtype": ("bfloat16",),
    "soft_cap": (None, 1.5),
    "sinks": (False, True),
    "scales": (None, "scalar", "per_head"),
}


def compiled(shape: Shape, options: Options, tuning: kernel_gpu.Tuning = SMALL) -> Callable[..., Any]:
    """The kernel for steps of one shape: (arrays of a case) -> (out, lse) of its rows."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)
    given = {name: getattr(options, name) for name in ("sinks", "k_scale", "v_scale")}
    given = {name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}

    def call(q, pages, tables, lens, starts, distribution):  # type: ignore[no-untyped-def]
        scalars = (options.sm_scale, options.soft_cap)
        step = kernel_gpu.Step.of(q, pages, tables, mask, *scalars, *given.values(), tuning)
        return kernel_gpu.decode(step, q[: shape.num_rows], lens, jnp.diff(starts), distribution[0])

    return compile_on_gpu(call, *make_case(0, shape, []).arrays)


def assert_right(result: tuple[np.ndarray, np.ndarray], case: Case, options: Options) -> None:
    """Row s is query token s: rows without a query stand last in these cases."""
    out, lse = case.expected(options)
    assert_close(result[0], out[: case.shape.num_rows], case.shape.q_dtype, "out")
    assert_close(result[1], lse[: case.shape.num_rows], "float32", "lse")


def random_rows(seed: int, shape: Shape) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    longest = shape.num_columns * shape.page_size
    return [(1, int(n)) for n in rng.integers(1, longest + 1, rng.integers(1, shape.num_rows + 1))]


@pytest.mark.parametrize("name", BLOCKS)
def test_equals_the_oracle(name: str) -> None:
    """No step at all, then more blocks than stages, several sequences to a thread block and the other way about."""
    change, mask = BLOCKS[name]
    shape = replace(SHAPE, **change)
    rng = np.random.default_rng(1)
    options = Options(**mask, sinks=rng.standard_normal(shape.num_q_heads), k_scale=0.7, v_scale=1.3)
    run = compiled(shape, options)
    for rows in ([], ROWS) if name == "full" else (ROWS,):
        case = make_case(1, shape, rows, options)
        assert_right(run(*case.arrays), case, options)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4))
def test_sweep(seed: int) -> None:
    """Every pair of features, random lengths, the sizes that the kernel itself chooses."""
    for index, choice in enumerate(pairwise(FACTORS, seed)):
        shape, options = shape_and_options(choice, 1000 * seed + index)
        run = compiled(shape, options, kernel_gpu.Tuning(num_blocks=5) if index % 2 else SMALL)
        for step in range(2):
            number = 1000 * seed + 10 * index + step
            case = make_case(number, shape, random_rows(number, shape), options)
            assert_right(run(*case.arrays), case, options)


def test_extreme_sinks_do_not_overflow() -> None:
    """A sink far above the logits takes all the weight, far below or -inf none."""
    shape = replace(SHAPE, num_q_heads=4)
    options = Options(sinks=np.array([3e38, -1e30, -np.inf, 1e4]))
    case = make_case(7, shape, [(1, 130)])
    assert_right(compiled(shape, options)(*case.arrays), case, options)


def test_a_nan_that_is_seen_comes_out() -> None:
    """In its own sequence alone."""
    case = make_case(4, SHAPE, ROWS)
    run = compiled(SHAPE, Options())
    clean = run(*case.arrays)[0]
    case.pages[1][case.block_tables[0, 9], 3] = np.nan
    out = run(*case.arrays)[0]
    assert np.isnan(out[0].astype(np.float32)).all()
    np.testing.assert_array_equal(out[1:], clean[1:])


@pytest.mark.skipif(gpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize("wait", ["wait_free", "wait_full"])
def test_a_missing_wait_is_found(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that does not wait for a barrier: the interpreter reports a race, or a barrier that nobody observed."""
    monkeypatch.setattr(KVRing, wait, lambda *_: None)
    jax.clear_caches()
    run = compiled(SHAPE, Options())
    with pytest.raises(Exception, match=r"race|observed|phase"):
        run(*make_case(9, SHAPE, ROWS).arrays)
    jax.clear_caches()


MASKS = (
    MaskRule(),
    MaskRule(sliding_window=30),
    MaskRule(attention_chunk_size=50),
    MaskRule(sliding_window=70, num_sink_tokens=40),
    MaskRule(causal=False, sliding_window=9),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [8, 64])
def test_blocks_are_whole_where_they_say_so(mask: MaskRule, page_size: int) -> None:
    """By trying every key: each seen key is in one block of a tile, whole blocks hold keys that all queries see."""
    rng = np.random.default_rng(page_size)
    seq_len = rng.integers(1, 400, 60)
    first = rng.integers(0, seq_len)
    last = np.minimum(seq_len - 1, first + rng.integers(0, 40, 60))
    tiles = (jnp.asarray(x, jnp.int32) for x in (first, last, seq_len))
    keys = Keys.of_tiles(mask, *tiles, page_size, 64)
    number = jnp.arange(16, dtype=jnp.int32)[:, None]
    order, num_whole = np.asarray(Keys(*(x[None] for x in keys)).block(number)), np.asarray(keys.num_whole)
    ends, sink_pages, shifts = (np.asarray(x) for x in (keys.end, keys.sink_pages, keys.shift))
    for i, end in enumerate(ends):
        pos = np.arange(first[i], last[i] + 1, dtype=np.int32)[:, None]
        key = np.arange(400, dtype=np.int32)
        seen = np.asarray(mask.visible(key, pos, pos, np.int32(seq_len[i]))) & (key < seq_len[i])
        blocks = order[:end, i]
        assert sorted(blocks) == list(range(end))
        slots = blocks[:, None] * 64 + np.arange(64)
        places = slots + np.where(slots < sink_pages[i] * page_size, 0, shifts[i] * page_size)
        assert set(key[seen.any(axis=0)]) <= set(places.reshape(-1))
        assert set(places[: num_whole[i]].reshape(-1)) <= set(key[seen.all(axis=0)])


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_the_plan_gives_every_block_to_one_piece(num_blocks: int) -> None:
    """Each block of each unit once; shares that differ by less than a block; a unit's pieces are its own."""
    config = GpuConfig(MaskRule(sliding_window=300), None, 2, 1, 64, 64, 16, "bfloat16", "bfloat16", 64, 2)
    plan = jax.jit(plan_decode, static_argnums=(3, 4))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lens = rng.integers(1, 500, 5).astype(np.int32)
        q_lens = rng.integers(0, 2, 5).astype(np.int32)
        pieces, blocks, units = (np.asarray(x) for x in plan(lens, 4, q_lens, config, num_blocks))
        done = [[] for _ in units]
        shares = []
        for first, end in blocks:
            shares.append(0)
            for piece in range(first, end):
                unit = pieces[piece, Field.SEQ] * 2 + pieces[piece, Field.HEAD]
                own = range(pieces[piece, Field.FIRST], pieces[piece, Field.END])
                done[unit] += own
                shares[-1] += len(own)
                assert units[unit, 0] <= piece < units[unit, 1] or not own
        for unit, found in enumerate(done):
            seq = unit // 2
            live = seq < 4 and q_lens[seq]
            first_page = max(lens[seq] - 300, 0) // 16
            pages = -(-lens[seq] // 16) - first_page
            assert found == list(range(-(-pages * 16 // 64) if live else 0))
            assert units[unit, 1] - units[unit, 0] == 0 or live
        assert max(shares) <= -(-sum(shares) // num_blocks) or not any(shares)


GOOD = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"platform": "tpu"}, "GPU kernels read split K and V pages"),
    "float32": ({"q_dtype": "float32"}, "take bfloat16 or float16 queries, got float32"),
    "mixed": ({"kv_dtype": "float16"}, "take pages of bfloat16 as the queries or of 8 bits, got float16"),
    "page": ({"page_size": 24}, "page sizes that are powers of two from 8 to 128, got 24"),
    "small page": ({"page_size": 4}, "page sizes that are powers of two from 8 to 128, got 4"),
    "dim": ({"head_dim": 72}, "head dimensions from 64 to 256 in steps of 16, got 72 and 72"),
    "dim, 8 bits": ({"head_dim": 80, "kv_dtype": "int8"}, "from 64 to 256 in steps of 32, got 80 and 80"),
    "small dim": ({"head_dim": 32}, "head dimensions from 64 to 256 in steps of 16, got 32 and 32"),
    "group": ({"num_q_heads": 130}, "at most 64 query heads per KV head, got 65"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernels_cannot_do(name: str) -> None:
    change, message = BAD[name]
    shape = Shape(**{"page_size": 16, **GOOD, **change})
    q, pages = make_case(0, shape, []).arrays[:2]
    assert message in str(kernel_gpu.reason_not_supported(q, pages, 2))


def test_what_the_kernels_can_do() -> None:
    q, pages = make_case(0, Shape(page_size=16, **GOOD), []).arrays[:2]
    assert kernel_gpu.reason_not_supported(q, pages, 2) is None
