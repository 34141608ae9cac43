"""Calls that do not fit a TPU's memories: "auto" takes the reference and says why, "tpu" refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import attention_layout, latent_layout
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.tpu import memory, mosaic


def shapes(*sizes: tuple[tuple[int, ...], str]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in sizes)


def step(num_seqs: int, num_columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Block tables, lengths, starts, distribution."""
    return shapes(
        ((num_seqs, num_columns), "int32"), ((num_seqs,), "int32"), ((num_seqs + 1,), "int32"), ((3,), "int32")
    )


def attention(
    tokens: int, num_seqs: int, columns: int, page_size: int, heads: tuple[int, int] = (8, 8), **mask: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """ragged_paged_attention of bfloat16, head dimension 128."""
    (array,) = attention_layout(
        num_kv_heads=heads[1], head_dim=128, page_size=page_size, dtype="bfloat16", platform="tpu"
    ).arrays
    q, pages = shapes(((tokens, heads[0], 128), "bfloat16"), (array.shape(64), "bfloat16"))

    def call(backend: str) -> Callable[..., Any]:
        return lambda q, pages, *step: ragged_paged_attention(
            q, (pages,), *step, sm_scale=0.1, num_kv_heads=heads[1], return_lse=True, backend=backend, **mask
        )

    return call, (q, pages, *step(num_seqs, columns))


def latent_attention(tokens: int, num_seqs: int, heads: int, dim: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    (array,) = latent_layout(head_dim=dim + 64, page_size=128, dtype="bfloat16", platform="tpu").arrays
    arrays = shapes(
        ((tokens, heads, dim), "bfloat16"), ((tokens, heads, 64), "bfloat16"), (array.shape(64), "bfloat16")
    )

    def call(backend: str) -> Callable[..., Any]:
        return lambda q, pe, pages, *step: mla_paged_attention(
            q, pe, (pages,), *step, sm_scale=0.1, page_size=128, backend=backend
        )

    return call, (*arrays, *step(num_seqs, 64))


def writes(tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    (array,) = attention_layout(num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", platform="tpu").arrays
    new = ((tokens, 8, 128), "bfloat16")
    arrays = shapes(new, new, (array.shape(8192), "bfloat16"), ((tokens,), "int32"))

    def call(backend: str) -> Callable[..., Any]:
        return lambda k, v, pages, slots: kv_write(k, v, (pages,), slots, backend=backend)

    return call, arrays


TOO_LARGE: dict[str, tuple[tuple[Callable[..., Any], tuple[Any, ...]], str]] = {
    "64 KV heads at page 512": (attention(256, 64, 16, 512, (64, 64)), "MiB in VMEM"),
    "items of 16,384 sequences": (attention(65536, 16384, 8, 16), "KiB of tables in scalar memory"),
    "8,192 query heads of latents": (latent_attention(64, 8, 8192, 512), "MiB in VMEM"),
    "runs of 32,769 tokens": (writes(32769), "up to 32768 tokens"),
}
FIT = {
    "65,536 tokens of 1,024 sequences at page 16": attention(65536, 1024, 128, 16),
    "many items beside middling tables": attention(65536, 1024, 128, 16, attention_chunk_size=8),
    "many items beside large tables": attention(65536, 1024, 2048, 16, attention_chunk_size=8),
    "32 KV heads at page 128": attention(256, 64, 64, 128, (32, 32)),
    "DeepSeek's latents": latent_attention(4096, 256, 128, 512),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_call_that_does_not_fit_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, once; asked for by name the kernel refuses with the same."""
    (call, arguments), reason = TOO_LARGE[name]
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call("tpu"), *arguments)
    expected = jax.eval_shape(call("reference"), *arguments)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match=f"{reason}.*the reference runs instead"):
        got = jax.make_jaxpr(call("auto"))(*arguments)
    assert "pallas_call" not in str(got)
    assert [x.shape for x in got.out_avals] == [x.shape for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("name", FIT)
def test_a_large_call_that_fits_runs_on_the_kernel(name: str) -> None:
    call, arguments = FIT[name]
    assert "pallas_call" in str(jax.make_jaxpr(call("tpu"))(*arguments))


def test_memory_is_counted() -> None:
    """Rows of 128 words in scalar memory, whole tiles in VMEM, twice what the grid's pipeline moves."""

    def kernel(scalars: Any, x: Any, y: Any, scratch: Any, tables: Any, done: Any) -> None:
        y[...] = x[...]

    def run(scalars: Any, x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(4,),
                in_specs=[pl.BlockSpec((16, 100), lambda i, *_: (i, 0))],
                out_specs=pl.BlockSpec((16, 100), lambda i, *_: (i, 0)),
                scratch_shapes=[
                    pltpu.VMEM((3, 2, 128), jnp.bfloat16),
                    pltpu.SMEM((200,), jnp.int32),
                    pltpu.SemaphoreType.DMA,
                ],
            ),
            out_shape=jax.ShapeDtypeStruct((64, 100), jnp.float32),
            compiler_params=mosaic.compiler_params(1 << 20),
            name="counted",
        )(scalars, x)

    (launch,) = memory.launches_of(run, jnp.zeros(300, jnp.int32), jnp.zeros((64, 100)))
    assert launch == ("counted", 4 * (384 + 256), 2 * 2 * 16 * 128 * 4 + 3 * 2 * 128 * 2, 1 << 20)


def test_a_chip_with_less_vmem_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    call, arguments = FIT["32 KV heads at page 128"]
    chip = SimpleNamespace(vmem_capacity_bytes=8 << 20, chip_version="v6e", mxu_column_size=256)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: chip)
    with pytest.raises(NotImplementedError, match="of 7; split the heads over more chips"):
        jax.eval_shape(call("tpu"), *arguments)
    assert np.isfinite(mosaic.vmem_budget_bytes())
