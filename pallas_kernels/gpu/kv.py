"""KV blocks on the GPU: from pages through bulk copies into a ring in shared memory, one warpgroup to others.

Flow:    pages + block tables + Keys -> [KVRing.fetch] -> ring -> [take_k, take_v] -> operands of matrix products

One warpgroup fetches, the others attend. K and V of a step go to slot `step % stages`, each with two barriers:

    full    the bulk copies arrive; attending warpgroups wait
    free    every attending warpgroup arrives once it has read the slot; the fetching one waits before it refills it

Steps count up over everything that a thread block attends, so that the next tile's first blocks are on their way
while the last ones of a tile are attended. Pages beyond a run are replaced by the null page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.places import PagePlaces
from pallas_kernels.gpu.plan import GpuConfig, Keys


def copy_sources(
    config: GpuConfig, tables: Any, seq: jax.Array, keys: Keys, block: jax.Array
) -> list[tuple[jax.Array, Any]]:
    """(page, first slot in it) of each bulk copy of a block of a sequence's keys."""
    page_size, copy = jnp.int32(config.page_size), config.copy_slots
    found = []
    for i in range(config.num_copies):
        first = block * config.block + i * copy
        in_run = lax.div(first, page_size)
        column = in_run + jnp.where(in_run < keys.sink_pages, 0, keys.shift)
        page = tables[seq, lax.min(column, jnp.int32(tables.shape[1] - 1))]
        offset = 0 if copy == config.page_size else pl.multiple_of(lax.rem(first, page_size), copy)
        found.append((jnp.where(in_run < keys.num_pages, page, 0), offset))
    return found


def block_parts(config: GpuConfig, head_dim: int) -> list[tuple[pl.Slice, pl.Slice]]:
    """(rows, columns) of parts of a block that a warpgroup holds in registers beside its softmax."""
    rows, columns = mosaic.ROWS, mosaic.tile_columns(head_dim)
    return [
        (pl.ds(row, rows), pl.ds(column, columns))
        for row in range(0, config.block, rows)
        for column in range(0, head_dim, columns)
    ]


class RingMemory(NamedTuple):
    """Shared memory and barriers of a ring."""

    k: Any  # [stages, block, D]
    v: Any  # [stages, block, Dv]
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    k_converted: Any = None  # [block, D] in the compute dtype, where pages hold 8-bit values
    v_converted: Any = None
    changed: Any = None  # where two warpgroups attend: both have done their part of a change to shared memory

    @classmethod
    def of(cls, config: GpuConfig, num_readers: int) -> RingMemory:
        """Scratch for `num_readers` attending warpgroups."""
        ring = (config.stages, config.block)
        full = plgpu.Barrier(num_arrivals=config.num_copies, num_barriers=config.stages)
        free = plgpu.Barrier(num_arrivals=num_readers, num_barriers=config.stages)
        k_converted, v_converted = None, None
        if config.is_converted:
            k_converted = mosaic.tiled((config.block, config.head_dim), config.compute_dtype)
            v_converted = mosaic.tiled((config.block, config.head_dim_v), config.compute_dtype)
        return cls(
            k=mosaic.tiled((*ring, config.head_dim), config.page_dtype),
            v=mosaic.tiled((*ring, config.head_dim_v), config.page_dtype),
            k_full=full,
            v_full=full,
            k_free=free,
            v_free=free,
            k_converted=k_converted,
            v_converted=v_converted,
            changed=plgpu.Barrier(num_arrivals=num_readers) if num_readers > 1 else None,
        )


@dataclass(frozen=True)
class KVRing:
    """References of one kernel."""

    config: GpuConfig
    tables: Any  # int32[S, P] block tables, in global memory
    k_pages: Any  # [tokens, Hkv, D]
    v_pages: Any  # [tokens, Hkv, Dv]
    places: tuple[PagePlaces, PagePlaces]  # of K and V
    memory: RingMemory
    reader: Any = 0  # which of the attending warpgroups this is

    def slot(self, step: jax.Array) -> jax.Array:
        """Place of a step in the ring."""
        return lax.rem(step, jnp.int32(self.config.stages))

    def fetch(self, step: jax.Array, seq: jax.Array, head: jax.Array, keys: Keys, block: jax.Array) -> None:
        """Starts the copies of a block of one sequence and KV head."""
        sources = copy_sources(self.config, self.tables, seq, keys, block)
        self.fetch_k(step, head, sources)
        self.fetch_v(step, head, sources)

    def fetch_k(self, step: jax.Array, head: jax.Array, sources: list[tuple[jax.Array, Any]]) -> None:
        """Starts the copies of K of a block, from `copy_sources`."""
        pages, memory = (self.k_pages, self.places[0]), self.memory
        self._fetch(step, head, sources, pages, memory.k, memory.k_full, memory.k_free)

    def fetch_v(self, step: jax.Array, head: jax.Array, sources: list[tuple[jax.Array, Any]]) -> None:
        """Starts the copies of V of a block, from `copy_sources`."""
        pages, memory = (self.v_pages, self.places[1]), self.memory
        self._fetch(step, head, sources, pages, memory.v, memory.v_full, memory.v_free)

    def _fetch(
        self, step: jax.Array, head: jax.Array, sources: list[tuple[jax.Array, Any]],
        pages: tuple[Any, PagePlaces], target: Any, full: Any, free: Any,
    ) -> None:  # fmt: skip
        slot, copy, (tokens, places) = self.slot(step), self.config.copy_slots, pages
        pl.when(step >= self.config.stages)(lambda: self.wait_free(free, slot))

        def start(number: int, _: Any) -> None:
            page, offset = sources[number]
            rows = tokens.at[pl.ds(places.entry(page) + offset, copy), head]
            plgpu.copy_gmem_to_smem(rows, target.at[slot, pl.ds(number * copy, copy)], full.at[slot])

        mosaic.start_copies(len(sources), start)

    def drain(self, num_steps: jax.Array) -> None:
        """Waits until all of `num_steps` steps have been read: no barrier may end in an open phase."""

        @pl.loop(lax.max(num_steps - self.config.stages, jnp.int32(0)), num_steps)
        def _(step: jax.Array) -> None:
            self.wait_free(self.memory.k_free, self.slot(step))
            self.wait_free(self.memory.v_free, self.slot(step))

    def wait_free(self, free: Any, slot: jax.Array) -> None:
        """Waits until a slot has been read."""
        plgpu.barrier_wait(free.at[slot])

    def wait_full(self, full: Any, slot: jax.Array) -> None:
        """Waits until the copies into a slot have arrived."""
        plgpu.barrier_wait(full.at[slot])

    def take_k(self, step: jax.Array) -> Any:
        """K [block, D] of a step, ready for a product; call `release_k` when done with it."""
        slot = self.slot(step)
        self.wait_full(self.memory.k_full, slot)
        if not self.config.is_converted:
            return self.memory.k.at[slot]

        def convert(part: tuple[pl.Slice, pl.Slice]) -> None:
            self.memory.k_converted[part] = mosaic.load_matrix(
                self.memory.k.at[(slot, *part)], self.config.compute_dtype
            )

        self._change(convert, self.config.head_dim)
        return self.memory.k_converted

    def release_k(self, step: jax.Array) -> None:
        """Says that this warpgroup has read K of a step."""
        plgpu.barrier_arrive(self.memory.k_free.at[self.slot(step)])

    def take_v(self, step: jax.Array, seen: Any) -> Any:
        """V [block, Dv] of a step, ready for a product; call `release_v` when done with it.

        `seen(first_row)` tells which of the 64 slots from `first_row` on any query sees, bool[64]; V is 0 elsewhere,
        since what stands there may be NaN. None: all are seen.
        """
        slot = self.slot(step)
        self.wait_full(self.memory.v_full, slot)
        if not self.config.is_converted and seen is None:
            return self.memory.v.at[slot]
        target = self.memory.v_converted if self.config.is_converted else self.memory.v.at[slot]

        def convert(part: tuple[pl.Slice, pl.Slice]) -> None:
            values = mosaic.load_matrix(self.memory.v.at[(slot, *part)], self.config.compute_dtype)
            if seen is not None:
                keep = mosaic.spread(seen(part[0].start), values.shape[1])
                values = jnp.where(keep, values, jnp.zeros_like(values))
            target[part] = values

        self._change(convert, self.config.head_dim_v)
        return target

    def release_v(self, step: jax.Array) -> None:
        """Says that this warpgroup has read V of a step."""
        plgpu.barrier_arrive(self.memory.v_free.at[self.slot(step)])

    def _change(self, convert: Callable[[tuple[pl.Slice, pl.Slice]], None], head_dim: int) -> None:
        """`convert` for every part of a block; two attending warpgroups do half each and wait for each other.

        The wait also keeps a converted block alive: who changes the next K has seen the other arrive with this V, that
        is after its product with this K, and the other way about.
        """
        parts = block_parts(self.config, head_dim)
        if self.memory.changed is None:
            for part in parts:
                convert(part)
            mosaic.fence()
            return
        for reader in range(2):

            @pl.when(self.reader == reader)
            def _(own: list[tuple[pl.Slice, pl.Slice]] = parts[reader::2]) -> None:
                for part in own:
                    convert(part)

        mosaic.fence()
        plgpu.barrier_arrive(self.memory.changed)
        self.wait_changed()

    def wait_changed(self) -> None:
        """Waits until both attending warpgroups have done their part of a change."""
        plgpu.barrier_wait(self.memory.changed)
