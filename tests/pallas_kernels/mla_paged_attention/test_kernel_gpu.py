"""The GPU kernel of latent attention against the float64 oracle: features, NaN wherever unseen, races, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu, gpu_device
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import kernel_gpu, mla_paged_attention
from pallas_kernels.mla_paged_attention.gpu_latents import LatentRing
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_close, assert_right
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, make_case

SMALL = kernel_gpu.Tuning(stages=2, num_blocks=3)
LATENT = LatentShape(head_dim=192, page_size=16, dtype="bfloat16")
SHAPE = Shape(
    num_tokens=16, num_rows=3, num_columns=18, num_q_heads=6, rope_dim=64, q_dtype="bfloat16", latent=LATENT
)  # ten tokens a tile
ROWS = [(1, 5), (1, 270), (9, 210)]  # more blocks than stages; tiles that are not full
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}, {}),
    "window and sink tokens, two tiles of heads": (
        {"num_q_heads": 66, "num_rows": 2, "num_tokens": 3},
        {},
        {"sliding_window": 150, "num_sink_tokens": 19, "soft_cap": 1.5},
    ),
    "chunk, float8": ({}, {"dtype": "float8_e4m3fn", "page_size": 8}, {"attention_chunk_size": 96}),
}


def compiled(shape: Shape, options: Options, tuning: kernel_gpu.Tuning = SMALL) -> Callable[..., Any]:
    """The kernel for steps of one shape: (arrays of a case) -> (out, lse)."""
    given = {name: getattr(options, name) for name in ("sinks", "k_scale")}
    call = functools.partial(
        kernel_gpu.mla_paged_attention,
        mask=MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens),
        sm_scale=options.sm_scale,
        soft_cap=options.soft_cap,
        **{name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()},
        page_size=shape.latent.page_size,
        tuning=tuning,
    )
    return compile_on_gpu(call, *make_case(0, shape, [], Options()).arrays)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    """Decoding and longer sequences, heads in several tiles, both halves of the values."""
    change, latent, mask = CASES[name]
    columns = {"num_columns": 288 // latent.get("page_size", LATENT.page_size)}
    shape = replace(SHAPE, **change, **columns, latent=replace(LATENT, **latent))
    rng = np.random.default_rng(1)
    given = {} if name == "full" else {"sinks": rng.standard_normal(shape.num_q_heads), "k_scale": 0.7, "v_scale": 0.7}
    options = Options(**mask, **given, sm_scale=0.1)
    case = make_case(1, shape, [(1, 270), (2, 210)] if shape.num_rows == 2 else ROWS, options)
    assert_right(compiled(shape, options)(*case.arrays), case.expected(options), case.shape.q_dtype)


TINY = replace(SHAPE, num_rows=1, num_q_heads=2)


@pytest.mark.skipif(gpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize(
    ("wait", "dtype"),
    [
        ("wait_free", "bfloat16"),
        ("wait_full", "bfloat16"),
        ("wait_weighed", "bfloat16"),
        ("wait_changed", "int8"),
        ("wait_idle", "int8"),
    ],
)
def test_a_missing_wait_is_found(wait: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that does not wait for a barrier: the interpreter reports a race, or a barrier that nobody observed."""
    monkeypatch.setattr(LatentRing, wait, lambda *_: None)
    shape = replace(TINY, latent=replace(LATENT, dtype=dtype))
    run = compiled(shape, Options(sm_scale=0.001))
    with pytest.raises(Exception, match=r"race|observed|phase"):
        run(*make_case(9, shape, [(9, 210)], Options()).arrays)


def test_the_op_writes_new_latents_and_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu": every token sees what the step itself writes; the pages are the reference's."""
    small = functools.partial(kernel_gpu.mla_paged_attention, tuning=SMALL)
    monkeypatch.setattr(kernel_gpu, "mla_paged_attention", small)
    case = make_case(3, TINY, [(9, 30)], Options())
    rng = np.random.default_rng(0)
    new_kv = tuple(jnp.asarray(rng.standard_normal((16, dim)), jnp.bfloat16) for dim in (128, 64))
    pos = np.arange(21, 30)
    slots = np.full(16, -1, np.int32)
    slots[:9] = case.block_tables[0, pos // 16] * 16 + pos % 16

    def step(*arrays, backend="gpu"):  # type: ignore[no-untyped-def]
        *arrays, c, r, slots = arrays
        written = {"new_kv": (c, r), "slot_mapping": slots}
        return mla_paged_attention(*arrays, **written, sm_scale=0.1, return_lse=True, backend=backend)

    arguments = (*case.arrays, *new_kv, jnp.asarray(slots))
    out, lse, pages = compile_on_gpu(step, *arguments)(*arguments)
    expected = jax.jit(functools.partial(step, backend="reference"))(*arguments)
    np.testing.assert_array_equal(pages[0].view(np.uint8), np.asarray(expected.pages[0]).view(np.uint8))
    assert_close(out, np.asarray(expected.out).astype(np.float64), "bfloat16", "out")
    assert_close(lse, np.asarray(expected.lse).astype(np.float64), "float32", "lse")


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "packed": ({}, {"platform": "tpu", "head_dim": 192}, "GPU kernels read latent pages"),
    "float32": ({"q_dtype": "float32"}, {}, "take bfloat16 or float16 queries, got float32"),
    "mixed": ({}, {"dtype": "float16"}, "take pages of bfloat16 as the queries or of 8 bits, got float16"),
    "page": ({}, {"page_size": 24}, "powers of two from 8 to 128, got 24"),
    "latent": ({}, {"head_dim": 128}, "in steps of 128 .* got 64 and 128"),
    "dim": ({"rope_dim": 32}, {"head_dim": 160}, "rotated key in steps of 64, got 128 and 160"),
    "large": ({"rope_dim": 128}, {"head_dim": 640}, "up to 576 .* got 512 and 640"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" refuses; "auto" on a GPU warns once and gives what Triton gives."""
    change, latent, message = BAD[name]
    shape = replace(TINY, **change, latent=replace(LATENT, **latent))
    case = make_case(12, shape, [(3, 9)], Options())
    with pytest.raises(NotImplementedError, match=f"mla_paged_attention: .*{message}"):
        mla_paged_attention(*case.arrays, sm_scale=0.1, page_size=shape.latent.page_size, backend="gpu")
    call = functools.partial(mla_paged_attention, *case.arrays, sm_scale=0.1, page_size=shape.latent.page_size)
    expected = call(backend="triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match="a kernel in Triton runs instead"):
        result = call()
    np.testing.assert_array_equal(np.asarray(result.out), np.asarray(expected.out))
    call()  # no second warning


@pytest.mark.parametrize("num_heads", range(1, 129))
def test_heads_fill_tiles(num_heads: int) -> None:
    """Tiles of at most 64 rows, all heads in whole tiles."""
    shape = kernel_gpu.tile_shape(num_heads)
    assert num_heads % shape.heads == 0
    assert 32 < shape.tokens * shape.heads <= 64 or num_heads > 64
