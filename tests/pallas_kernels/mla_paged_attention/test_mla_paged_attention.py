"""Latent attention against the float64 oracle, and its laws."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.latent_write import latent_write
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.mla_paged_attention.shapes import SHAPES
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, assert_matches_oracle, make_case, run

WINDOW = Options(sliding_window=9)


@pytest.mark.parametrize("options", [Options(), WINDOW], ids=["full", "window"])
def test_chunked_prefill_and_decode_equal_one_prefill(options: Options) -> None:
    """Tokens in chunks of any size, one at a time included, each call writing its latents first."""
    shape, length = Shape(num_tokens=40, num_rows=1), 38
    case = make_case(3, shape, [(length, length)], Options())
    latents = random_values(np.random.default_rng(1), (length, 24), "float32")
    outs = [_in_chunks(case, latents, chunks, options) for chunks in ([38], [20, 18], [1] * 4 + [34], [37, 1])]
    for out, lse in outs[1:]:
        assert_close(out, outs[0][0].astype(np.float64), "float32", "out")
        assert_close(lse, outs[0][1].astype(np.float64), "float32", "lse")


def _in_chunks(case: Any, latents: np.ndarray, chunks: list[int], options: Options) -> tuple[np.ndarray, np.ndarray]:
    q_nope, q_pe, (page,), tables = case.arrays[:4]
    pages = (jnp.full(page.shape, jnp.nan).at[0].set(0),)
    outs, lses, done = [], [], 0
    for size in chunks:
        tokens = np.arange(done, done + size)
        slots = np.full(40, -1, np.int32)
        slots[:size] = case.block_tables[0, tokens // 4] * 4 + tokens % 4
        q = [jnp.asarray(np.resize(x[done : done + size], (40, *x.shape[1:]))) for x in (q_nope, q_pe)]
        new = np.resize(latents[done : done + size], (40, 24))
        done += size
        step = (tables, jnp.int32([done]), jnp.int32([0, size]), jnp.int32([size == 1, size == 1, 1]))
        result = run(
            _Given(case.shape, (*q, pages, *step)),  # type: ignore[arg-type]
            options,
            new_kv=(jnp.asarray(new[:, :-8]), jnp.asarray(new[:, -8:])),
            slot_mapping=jnp.asarray(slots),
        )
        pages = result.pages
        outs.append(result.out[:size])
        lses.append(result.lse[:size])
    return np.concatenate(outs), np.concatenate(lses)


class _Given:
    """A case whose arrays are given."""

    def __init__(self, shape: Shape, arrays: tuple) -> None:
        self.shape, self.arrays = shape, arrays


def test_new_kv_is_what_latent_write_writes() -> None:
    """The fused write and a write apart give equal bits, pages included."""
    case = make_case(4, Shape(num_tokens=6, num_rows=1), [(6, 6)], Options())
    rng = np.random.default_rng(0)
    latent, key = random_values(rng, (6, 16), "float32"), random_values(rng, (6, 8), "float32")
    slots = jnp.asarray(case.block_tables[0, np.arange(6) // 4] * 4 + np.arange(6) % 4)
    scale = jnp.float32(2)
    fused = run(case, Options(k_scale=scale), new_kv=(jnp.asarray(latent), jnp.asarray(key)), slot_mapping=slots)
    q_nope, q_pe, pages, *step = case.arrays
    pages = latent_write(jnp.concatenate([latent, key], axis=1), pages, slots, scale=scale)
    apart = mla_paged_attention(q_nope, q_pe, pages, *step, sm_scale=Options().sm_scale, k_scale=scale)
    np.testing.assert_array_equal(fused.out, apart.out)
    np.testing.assert_array_equal(fused.pages[0], pages[0])
    assert apart.lse is None


@pytest.mark.parametrize(
    "name",
    [pytest.param(m.name, marks=() if m.name == "deepseek-v3" else pytest.mark.sweep) for m in SHAPES],
)
def test_model_shape(name: str) -> None:
    """bfloat16 over packed bfloat16 pages of 16, one shard of sixteen; a decode and a prefill row."""
    (model,) = (shape for shape in SHAPES if shape.name == name)
    latent = LatentShape(model.latent_dim + model.rope_dim, 16, "bfloat16", "tpu")
    shape = Shape(9, 2, 20, model.per_shard(16), model.rope_dim, "bfloat16", latent)
    options = Options(sm_scale=model.sm_scale)
    assert_matches_oracle(make_case(0, shape, [(1, 300), (8, 170)], options), options)


def test_shards_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="deepseek-v3: expected shards that divide 128 query heads, got 3"):
        {model.name: model for model in SHAPES}["deepseek-v3"].per_shard(3)
