"""The compiled module: in place, no array of the pool's or the bucket's size, and the same under shard_map."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.layouts import attention_layout
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

NUM_PAGES = 4099


def _compiled(dtype: str, num_columns: int) -> jax.stages.Compiled:
    """An update step of 32 tokens and 8 rows: writes new KV into donated pages and attends."""
    layout = attention_layout(num_kv_heads=2, head_dim=32, page_size=16, dtype=dtype)
    pages = tuple(jax.ShapeDtypeStruct(a.shape(NUM_PAGES), jnp.dtype(a.dtype)) for a in layout.arrays)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8, num_columns), (8,), (9,), (3,), (32,))]
    q, kv = (jax.ShapeDtypeStruct((32, heads, 32), jnp.float32) for heads in (4, 2))

    def step(pages, q, k, v, tables, lens, starts, distribution, slots):
        result = ragged_paged_attention(
            q, pages, tables, lens, starts, distribution, new_kv=(k, v), slot_mapping=slots, sm_scale=0.2
        )
        return result.pages, result.out

    return jax.jit(step, donate_argnums=0).lower(pages, q, kv, kv, *ints).compile()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_step_updates_its_pages_in_place(dtype: str) -> None:
    """Both page arrays are aliased; nothing copies, converts or transposes them."""
    compiled = _compiled(dtype, 64)
    text = compiled.as_text()
    head = text.splitlines()[0]
    assert "{0}: (0, {}, may-alias)" in head
    assert "{1}: (1, {}, may-alias)" in head
    assert not re.findall(rf"= \S+\[{NUM_PAGES},\S* (?:copy|convert|transpose)\(", text)
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_memory_does_not_follow_the_bucket() -> None:
    """Tables 32 times as wide need no more memory beside themselves: no mask or score over all columns."""
    narrow, wide = (_compiled("float32", n).memory_analysis().temp_size_in_bytes for n in (64, 2048))
    assert wide <= narrow + 4 * 8 * 2048


def test_sharded_heads_agree_with_one_device() -> None:
    """Under shard_map over 4 virtual devices, heads split: the results of one device."""
    program = Path(__file__).with_name("sharded_program.py")
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n"
