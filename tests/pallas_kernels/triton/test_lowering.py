"""Every kernel in Triton made into Triton's own code for a card, without one: interpretation takes what this refuses.

Vectors whose size is no power of two, dtypes and primitives that Triton lacks, indices of mixed widths in arrays beyond
4 GiB. Nothing is compiled, and arrays are shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.compressor_update import compressor_update
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ssm_update import selective_scan
from pallas_kernels.triton.call import call, store

NUM_TOKENS, NUM_SEQS, NUM_COLUMNS = 9, 3, 20
CARD = jax.sharding.AbstractDevice(device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu")


def shape(dtype: str, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def step() -> tuple[jax.ShapeDtypeStruct, ...]:
    """Block tables, lengths, first tokens and distribution."""
    return tuple(shape("int32", *sizes) for sizes in ((NUM_SEQS, NUM_COLUMNS), (NUM_SEQS,), (NUM_SEQS + 1,), (3,)))


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    """The module for a card."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=CARD)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("q_dtype", "page_dtype", "sizes", "options"),
    [
        ("bfloat16", "float8_e4m3fn", (5, 1, 80, 16), {"soft_cap": 3.0}),
        ("bfloat16", "float8_e5m2", (71, 1, 40, 16), {"num_sink_tokens": 5, "sliding_window": 20}),
        ("float32", "float32", (14, 2, 256, 24), {"attention_chunk_size": 32}),
        ("float32", "int8", (4, 4, 16, 8), {"context_size": 2, "context_rank": 1}),
    ],
)
def test_attention(q_dtype: str, page_dtype: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    num_heads, num_kv_heads, dim, page = sizes

    def attend(q: Any, page: Any, step: Any, sinks: Any) -> Any:
        given = {} if "context_size" in options else {"sinks": sinks}
        return ragged_paged_attention(q, (page, page), *step, sm_scale=0.1, **options, **given, backend="triton").out

    q, pages = shape(q_dtype, NUM_TOKENS, num_heads, dim), shape(page_dtype, 40, page, num_kv_heads, dim)
    module = lowered(attend, q, pages, step(), shape("float32", num_heads))
    assert "attend_lanes" in module
    assert "merge_pieces" in module


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8"])
def test_attention_over_large_pools(page_dtype: str) -> None:
    """Beyond 4 GiB entries are counted in 64 bits, while page ids and slots have 32."""

    def attend(q: Any, page: Any, step: Any) -> Any:
        return ragged_paged_attention(q, (page, page), *step, sm_scale=0.1, backend="triton").out

    assert "attend_lanes" in lowered(
        attend, shape("bfloat16", NUM_TOKENS, 32, 128), shape(page_dtype, 1 << 19, 16, 8, 128), step()
    )


@pytest.mark.parametrize(("dims", "page_dtype"), [((512, 64), "float8_e4m3fn"), ((24, 8), "float32")])
def test_latent_attention(dims: tuple[int, int], page_dtype: str) -> None:
    def attend(nope: Any, rope: Any, page: Any, step: Any) -> Any:
        return mla_paged_attention(nope, rope, (page,), *step, sm_scale=0.1, backend="triton").out

    queries = (shape("bfloat16", NUM_TOKENS, 20, dim) for dim in dims)
    assert "attend_lanes" in lowered(attend, *queries, shape(page_dtype, 40, 16, sum(dims)), step())


@pytest.mark.parametrize(
    ("entries", "dim", "page_dtype"),
    [(IndexFp8(), 128, "int8"), (Plain(), 40, "float8_e4m3fn"), (Plain(), 96, "bfloat16")],
)
def test_index_scores(entries: EntryFormat, dim: int, page_dtype: str) -> None:
    def pick(q: Any, weights: Any, page: Any, step: Any) -> Any:
        sizes = {"topk": 40, "tokens_per_state": 4, "page_size": 12}
        return indexer_topk(q, weights, (page,), *step, **sizes, entries=entries, backend="triton")

    q, weights = shape("bfloat16", NUM_TOKENS, 5, dim), shape("bfloat16", NUM_TOKENS, 5)
    assert "score_tiles" in lowered(pick, q, weights, shape(page_dtype, 40, 12, entries.width(dim)), step())


@pytest.mark.parametrize(("ratio", "dim", "overlap"), [(4, 512, True), (128, 96, False), (3, 40, True)])
def test_pooling(ratio: int, dim: int, overlap: bool) -> None:
    width = dim * (1 + overlap)

    def pool(kv: Any, page: Any, step: Any, slots: Any, bias: Any) -> Any:
        given = {"position_bias": bias, "overlap": overlap, "backend": "triton"}
        return compressor_update(kv, kv, (page,), *step, slots, **given).entries

    kv, bias = shape("bfloat16", NUM_TOKENS, width), shape("float32", ratio, width)
    pages = shape("float32", 40, 8, 2 * width)
    assert "pool_entries" in lowered(pool, kv, pages, step(), shape("int32", NUM_TOKENS), bias)


@pytest.mark.parametrize(
    ("sizes", "x_dtype", "b_dtype", "state_dtype"),
    [
        ((8, 64, 128, 1), "bfloat16", "bfloat16", "float32"),
        ((6, 24, 40, 2), "float32", "bfloat16", "bfloat16"),
        ((4, 8, 8, 4), "float16", "float16", "float16"),
    ],
)
def test_scan(sizes: tuple[int, ...], x_dtype: str, b_dtype: str, state_dtype: str) -> None:
    heads, head_dim, state_dim, groups = sizes

    def scan(x: Any, states: Any, dt: Any, a: Any, b: Any, step: Any) -> Any:
        return selective_scan(x, states, dt, a, b, b, *step, d=a, backend="triton")

    per_seq = shape("int32", NUM_SEQS)
    of_step = (shape("int32", NUM_SEQS + 1), shape("int32", 3), per_seq, per_seq, shape("bool", NUM_SEQS))
    module = lowered(
        scan,
        shape(x_dtype, NUM_TOKENS, heads, head_dim),
        shape(state_dtype, 9, heads, head_dim, state_dim),
        shape(x_dtype, NUM_TOKENS, heads),
        shape("float32", heads),
        shape(b_dtype, NUM_TOKENS, groups, state_dim),
        of_step,
    )
    assert "scan_sequences" in module


def test_what_interpretation_takes_may_be_refused() -> None:
    """Twenty-four numbers at once: no vector of Triton."""

    def numbers() -> Any:
        def body(out: Any) -> None:
            place = lax.iota(jnp.int32, 24)
            store(out, (place,), place)

        return call(body, name="numbers", grid=(1,), inputs=[], outputs=[jax.ShapeDtypeStruct((24,), jnp.int32)])[0]

    assert numbers().tolist() == list(range(24))
    with pytest.raises(Exception, match="power of 2"):
        lowered(numbers)
