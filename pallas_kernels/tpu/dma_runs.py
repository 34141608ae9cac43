"""Runs of rows that are copied between arrays in HBM, one DMA a run.

Flow:    (valid, source, target) per row -> [copy_runs] -> int32 table in SMEM -> [copy_all] in a kernel

Rows i and i + 1 belong to one run if both are valid and both source and target go up by one. The table holds first
source, first target and length of each run, and at the end how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu.mosaic import Copy, Ref

LARGEST_TABLE_ROWS = 1 << 15  # 384 KiB of 1 MiB of scalar memory
MOST_UNDER_WAY = 64  # runs: a DMA semaphore counts the bytes that have arrived in 32 bits
LONGEST_RUN_BYTES = 16 << 20  # so that all runs under way are at most 1 GiB


def copy_runs(
    valid: jax.Array,  # bool[n]
    source: jax.Array,  # int32[n]
    target: jax.Array,  # int32[n]
    boundary: int | None = None,  # a run does not cross multiples of it in `target`
) -> jax.Array:
    """int32[3 * n + 1] table of the runs."""
    size = valid.shape[0]
    before = jnp.arange(size) - 1
    follows = valid[before] & (source == source[before] + 1) & (target == target[before] + 1) & (before >= 0)
    if boundary is not None:
        follows = follows & (target % boundary != 0)
    starts = valid & ~follows
    run = jnp.cumsum(starts, dtype=jnp.int32) - 1
    at_start = jnp.where(starts, run, size)
    first = [jnp.zeros(size, jnp.int32).at[at_start].set(x.astype(jnp.int32), mode="drop") for x in (source, target)]
    length = jnp.zeros(size, jnp.int32).at[jnp.where(valid, run, size)].add(1, mode="drop")
    return jnp.concatenate([*first, length, jnp.sum(starts, dtype=jnp.int32)[None]])


def copy_all(
    table: Ref,
    make_copy: Callable[[jax.Array, jax.Array, jax.Array], Copy],
    *,
    first: jax.Array | int = 0,
    size: int | None = None,
    meanwhile: Callable[[], Any] | None = None,
) -> Any:
    """In a kernel: starts `make_copy(source, target, length)` of every run, `MOST_UNDER_WAY` at a time; waits for all.

    `first` and `size`: where the table of so many rows begins, if the reference holds several. `meanwhile` runs when
    all have been started, before the last of them are waited for; what it returns is returned.
    """
    if size is None:
        size = (table.shape[0] - 1) // 3
    count = table[first + 3 * size]

    def copy(i: jax.Array) -> Copy:
        at = first + i
        return make_copy(table[at], table[size + at], table[2 * size + at])

    def start_after_another(i: jax.Array, carry: None) -> None:
        copy(i - MOST_UNDER_WAY).wait()
        copy(i).start()
        return carry

    lax.fori_loop(0, jnp.minimum(count, MOST_UNDER_WAY), lambda i, _: copy(i).start(), None)
    lax.fori_loop(MOST_UNDER_WAY, count, start_after_another, None)
    result = None if meanwhile is None else meanwhile()
    lax.fori_loop(jnp.maximum(count - MOST_UNDER_WAY, 0), count, lambda i, _: copy(i).wait(), None)
    return result
