"""States that requests run on, kept in fewer bits while they are only cached.

Flow:    StepPlan.idle_states -> [load_idle_states] -> the step -> [store_idle_states] -> KVPages
Source:  ARCHITECTURE.md, "Idle states"; layouts: kvjax.planning.states.idle_states

A layer's running page is the arrays of a state, the last that of the recurrence. Its idle page has the same arrays, the
last one as integers, and behind them a float32 scale for each head, or whatever the state's first dimension is:

    scale[head]    = max |state[head]| / (largest integer)
    integer[head]  = round(state[head] / scale[head])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax.core.pool.page_edits import NO_PAGES, PageCopies
from kvjax.core.step.step_plan import IdleStateMoves, StepPlan
from kvjax.device.mesh.placement import per_device
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import Column, KVPages
from kvjax.device.pages.page_ops import SKIP, check_page_ids, padded_pieces
from pallas_kernels import page_ops
from pallas_kernels.slab_pages import replaced

# Pages of some states, array by array [n, *page_shape] -> the same states as the other pool keeps them.
Convert: TypeAlias = Callable[[Sequence[jax.Array], Column], list[jax.Array]]


def quantized(states: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:  # [n, heads, ...]
    """Integers of `dtype` of the same shape, and their scales float32[n, heads]; a head of zeros has a scale of 0."""
    largest = jnp.iinfo(dtype).max
    numbers = states.astype(jnp.float32)
    scales = jnp.abs(numbers).max(axis=tuple(range(2, states.ndim))) / largest
    steps = jnp.where(scales > 0, scales, 1.0).reshape(*scales.shape, *[1] * (states.ndim - 2))
    return jnp.clip(jnp.round(numbers / steps), -largest, largest).astype(dtype), scales


def dequantized(integers: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """States of `dtype` [n, heads, ...] of integers of that shape and their scales float32[n, heads]."""
    steps = scales.reshape(*scales.shape, *[1] * (integers.ndim - 2))
    return (integers.astype(jnp.float32) * steps).astype(dtype)


def check_moves(pages: KVPages, plan: StepPlan) -> None:
    """Raises ValueError unless the plan's states can change pools: pages exist, and none is written that is null."""
    for moves in plan.idle_states:
        sizes = pages.num_pages(moves.running_pool), pages.num_pages(moves.idle_pool)
        for copies, (source, destination) in ((moves.loads, sizes[::-1]), (moves.stores, sizes)):
            check_page_ids(copies.sources, source, "states to move", lowest=0)
            check_page_ids(copies.destinations, destination, "pages of moved states")


def load_idle_states(
    pages: KVPages, plans: Sequence[StepPlan | None], page_counts: Sequence[int], *, backend: str = "auto"
) -> KVPages:
    """Dispatches what the plans of all data ranks load before their step; donates `pages`."""
    return _move(pages, plans, _load, page_counts, backend)


def store_idle_states(
    pages: KVPages, plans: Sequence[StepPlan | None], page_counts: Sequence[int], *, backend: str = "auto"
) -> KVPages:
    """Dispatches what they store after it; donates `pages`."""
    return _move(pages, plans, _store, page_counts, backend)


@hands_over
def warm_up_moves(
    pages: KVPages, pools: Sequence[tuple[int, int]], page_counts: Sequence[int], *, backend: str = "auto"
) -> KVPages:
    """Compiles moves between (running, idle) pools in every declared length, by none; the pages, unchanged in value."""
    for running, idle in pools:
        for count in page_counts:
            for source, destination, convert in ((idle, running, loaded), (running, idle, stored)):
                ids = [np.full(count * pages.num_ranks, SKIP, np.int32) for _ in range(2)]
                pages = move_states_padded(pages, source, destination, *ids, convert=convert, backend=backend)
    return pages


def _load(moves: IdleStateMoves) -> tuple[int, int, PageCopies, Convert]:
    return moves.idle_pool, moves.running_pool, moves.loads, loaded


def _store(moves: IdleStateMoves) -> tuple[int, int, PageCopies, Convert]:
    return moves.running_pool, moves.idle_pool, moves.stores, stored


@hands_over
def _move(
    pages: KVPages,
    plans: Sequence[StepPlan | None],
    direction: Callable[[IdleStateMoves], tuple[int, int, PageCopies, Convert]],
    page_counts: Sequence[int],
    backend: str,
) -> KVPages:
    some = next(plan for plan in plans if plan is not None)
    for i in range(len(some.idle_states)):
        source, destination, _, convert = direction(some.idle_states[i])
        copies = [None if plan is None else direction(plan.idle_states[i])[2] for plan in plans]
        sources = [NO_PAGES if one is None else one.sources for one in copies]
        destinations = [NO_PAGES if one is None else one.destinations for one in copies]
        pieces = (padded_pieces(ids, page_counts) for ids in (sources, destinations))
        for ids in zip(*pieces, strict=True):
            pages = move_states_padded(pages, source, destination, *ids, convert=convert, backend=backend)
    return pages


@partial(jax.jit, static_argnums=(1, 2), static_argnames=("convert", "backend"), donate_argnums=0)
def move_states_padded(
    pages: KVPages,
    source_pool: int,
    destination_pool: int,
    sources: jax.Array,  # int32[ranks * count] -1: the null page
    destinations: jax.Array,  # int32[ranks * count] -1: skip
    *,
    convert: Convert,
    backend: str,
) -> KVPages:
    """The pages with states of one pool in the other, column by column; each device moves its heads."""
    for place in range(min(len(pages.shardings[pool_id]) for pool_id in (source_pool, destination_pool))):
        sharding = pages.shardings[destination_pool][place][0]
        rows = PartitionSpec(sharding.spec[0])
        specs = pages.specs(source_pool, place), pages.specs(destination_pool, place)

        def move(source: Column, destination: Column, sources: jax.Array, destinations: jax.Array) -> Column:
            states = [page_ops.gather_pages(array, sources, backend=backend) for array in source]
            for i, values in enumerate(convert(states, destination)):
                written = page_ops.scatter_pages(destination[i], destinations, values, backend=backend)
                destination = replaced(destination, i, written)
            return destination

        move_on_each = per_device(move, sharding.mesh, (*specs, rows, rows), specs[1])
        columns = pages.column(source_pool, place), pages.column(destination_pool, place)
        pages = pages.with_column(destination_pool, place, move_on_each(*columns, sources, destinations))
    return pages


def loaded(idle: Sequence[jax.Array], running: Column) -> list[jax.Array]:
    """Idle states as the arrays of running ones."""
    *others, integers, scales = idle
    return [*others, dequantized(integers, scales, running[-1].dtype)]


def stored(running: Sequence[jax.Array], idle: Column) -> list[jax.Array]:
    """Running states as the arrays of idle ones."""
    *others, states = running
    return [*others, *quantized(states, idle[len(others)].dtype)]


__all__ = [
    "check_moves",
    "dequantized",
    "load_idle_states",
    "loaded",
    "move_states_padded",
    "quantized",
    "store_idle_states",
    "stored",
    "warm_up_moves",
]
