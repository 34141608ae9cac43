"""LSE of the TPU kernels: heads in lanes, and few bytes in HBM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts import attention_layout, latent_layout
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.tpu.lse import by_head, heads_to_lanes, lse_shape
from pallas_kernels.tpu.memory import pallas_calls

TOKENS, HEADS = 8192, 128


@pytest.mark.parametrize("heads", [1, 8, 127, 128, 129, 300])
def test_heads_go_to_lanes(heads: int) -> None:
    """Each head's number, -inf and NaN as they are."""
    numbers = np.random.default_rng(heads).standard_normal((5, heads)).astype(np.float32)
    numbers[0, 0], numbers[1, -1] = -np.inf, np.nan
    lanes = heads_to_lanes(jnp.broadcast_to(jnp.asarray(numbers)[..., None], (5, heads, 128)))
    assert lanes.shape == lse_shape(5, heads)
    np.testing.assert_array_equal(by_head(lanes, heads), numbers)


def shape(size: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))


def step(num_seqs: int = 16) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = ((num_seqs, 64), (num_seqs,), (num_seqs + 1,), (3,))
    return tuple(shape(size, "int32") for size in sizes)


def latents(q: Any, pe: Any, pages: Any, *step: Any) -> Any:
    return mla_paged_attention(q, pe, (pages,), *step, sm_scale=0.1, page_size=128, return_lse=True, backend="tpu")


def sparse(q: Any, pages: Any, *step: Any) -> Any:
    return sparse_mla_attention(
        q, (pages,), *step, sm_scale=0.1, sliding_window=128, page_size=128, return_lse=True, backend="tpu"
    )


def ragged(q: Any, pages: Any, *step: Any) -> Any:
    return ragged_paged_attention(q, (pages,), *step, sm_scale=0.1, num_kv_heads=8, return_lse=True, backend="tpu")


def pages(dim: int) -> jax.ShapeDtypeStruct:
    (array,) = latent_layout(head_dim=dim, page_size=128, dtype="bfloat16", platform="tpu").arrays
    return shape(array.shape(64), "bfloat16")


KV = attention_layout(num_kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16", platform="tpu").arrays[0]
OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "ragged_paged_attention": (
        ragged,
        (shape((TOKENS, HEADS, 128), "bfloat16"), shape(KV.shape(64), "bfloat16"), *step()),
    ),
    "mla_paged_attention": (
        latents,
        (shape((TOKENS, HEADS, 512), "bfloat16"), shape((TOKENS, HEADS, 64), "bfloat16"), pages(576), *step()),
    ),
    "sparse_mla_attention": (sparse, (shape((TOKENS, HEADS, 512), "bfloat16"), pages(512), *step())),
}


@pytest.mark.parametrize("op", OPS)
def test_lse_takes_4_bytes_a_head(op: str) -> None:
    """8,192 tokens of 128 heads: 4 MiB a launch, where a row of 128 lanes for each would be 512."""
    call, arguments = OPS[op]
    kernels = pallas_calls(jax.make_jaxpr(call)(*arguments).jaxpr)
    written = [v.aval for kernel in kernels for v in kernel.outvars if v.aval.dtype == jnp.float32]
    assert written
    assert max(4 * math.prod(x.shape) for x in written) <= 4 * TOKENS * HEADS
