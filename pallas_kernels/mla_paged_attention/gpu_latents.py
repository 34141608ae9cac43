"""Blocks of latents on the GPU: a ring in shared memory that three warpgroups read, one of which also fills it.

Flow:    latent pages + block tables + Keys -> [LatentRing.fetch] -> ring -> [take_keys, take_values] -> products

A block is keys and values at once, so that it is read from memory once. It goes to slot `step % stages`. The warpgroup
that fetches makes its scores and weights; the *adding* ones share the columns of the values:

    full     the bulk copies arrive; all wait
    changed  both adding warpgroups have converted their half of a block of 8-bit values; the fetching one waits
    weighed  the weights stand in the place of the block's rotated keys; the adding ones wait
    free     both adding warpgroups have read the slot; the fetching one waits before it refills it
    idle     both have read the converted block before, which the next change overwrites

None can wait for ever: the fetching warpgroup waits for the adding ones at blocks before its own alone, whose weights
it has given; they wait for each other only at the start of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.kv import block_parts, copy_sources
from pallas_kernels.gpu.places import PagePlaces
from pallas_kernels.gpu.plan import GpuConfig, Keys

ADDING = 2  # warpgroups


class LatentMemory(NamedTuple):
    """Shared memory and barriers of a ring."""

    latents: Any  # [stages, block, D]
    shrink: Any  # float32[stages, 64] what sums so far are multiplied with at a step
    full: Any
    weighed: Any
    free: Any
    converted: Any = None  # [block, D] in the compute dtype, where pages hold 8-bit values
    changed: Any = None
    idle: Any = None

    @classmethod
    def of(cls, config: GpuConfig) -> LatentMemory:
        """Scratch."""
        converted, adding = None, None
        if config.is_converted:
            converted = mosaic.tiled((config.block, config.head_dim), config.compute_dtype)
            adding = plgpu.Barrier(num_arrivals=ADDING)
        return cls(
            latents=mosaic.tiled((config.stages, config.block, config.head_dim), config.page_dtype),
            shrink=plgpu.SMEM((config.stages, mosaic.ROWS), jnp.float32),
            full=plgpu.Barrier(num_arrivals=config.num_copies, num_barriers=config.stages),
            weighed=plgpu.Barrier(num_barriers=config.stages),
            free=plgpu.Barrier(num_arrivals=ADDING, num_barriers=config.stages),
            converted=converted,
            changed=adding,
            idle=adding,
        )


@dataclass(frozen=True)
class LatentRing:
    """References of one kernel."""

    config: GpuConfig
    tables: Any  # int32[S, P] block tables, in global memory
    pages: Any  # [states, D]
    places: PagePlaces  # of pages, in states
    memory: LatentMemory
    warpgroup: Any  # int32[] this one: the adding ones come first

    def fetch(self, step: jax.Array, seq: jax.Array, keys: Keys, block: jax.Array) -> None:
        """Starts the copies of a block of one sequence, once its slot is free."""
        slot, copy = self.slot(step), self.config.copy_slots
        pl.when(step >= self.config.stages)(lambda: self.wait_free(slot))
        sources = copy_sources(self.config, self.tables, seq, keys, block)

        def start(number: int, _: Any) -> None:
            page, offset = sources[number]
            rows = self.pages.at[pl.ds(self.places.entry(page) + offset, copy)]
            target = self.memory.latents.at[slot, pl.ds(number * copy, copy)]
            plgpu.copy_gmem_to_smem(rows, target, self.memory.full.at[slot])

        mosaic.start_copies(len(sources), start)

    def take_keys(self, step: jax.Array) -> Any:
        """The block [block, D] of a step, ready for the product of scores; call `give_weights` when done with it."""
        slot = self.slot(step)
        self.wait_full(slot)
        if not self.config.is_converted:
            return self.memory.latents.at[slot]
        self.wait_changed()
        return self.memory.converted

    def give_weights(self, step: jax.Array, weights: jax.Array, shrink: jax.Array) -> None:
        """Hands over the weights [64, block] of a step, and what sums so far are multiplied with, float32[64]."""
        slot = self.slot(step)
        self._weights(slot)[...] = weights
        self.memory.shrink[slot] = shrink
        mosaic.fence()
        plgpu.barrier_arrive(self.memory.weighed.at[slot])

    def take_values(self, step: jax.Array, seen: Any) -> tuple[Any, Any, Any]:
        """(block [block, D], weights [64, block], `shrink`) of a step; call `release` when done with them.

        `seen(first_row)` tells which of the 64 slots from `first_row` on any query sees, bool[64]: values of the others
        become 0, since what stands there may be NaN. None: all are seen.
        """
        slot = self.slot(step)
        self.wait_full(slot)
        if self.config.is_converted:
            plgpu.barrier_arrive(self.memory.idle)
            self.wait_idle()
            parts = block_parts(self.config, self.config.head_dim)
            self._change(self.memory.converted, slot, seen, [parts[reader::ADDING] for reader in range(ADDING)])
            plgpu.barrier_arrive(self.memory.changed)
        self.wait_weighed(slot)
        block = self.memory.converted if self.config.is_converted else self.memory.latents.at[slot]
        if not self.config.is_converted and seen is not None:
            parts = block_parts(self.config, self.config.head_dim_v)
            half = len(parts) // ADDING
            self._change(block, slot, seen, [parts[:half], parts[half:]])
        return block, self._weights(slot), self.memory.shrink.at[slot]

    def release(self, step: jax.Array) -> None:
        """Says that this warpgroup has read the block of a step."""
        plgpu.barrier_arrive(self.memory.free.at[self.slot(step)])

    def _weights(self, slot: jax.Array) -> Any:
        """Where a block's weights stand: a tile of rotated keys, which nobody reads after the product of scores."""
        columns = pl.ds(self.config.head_dim_v, self.config.block)
        return (
            self.memory.converted.at[:, columns]
            if self.config.is_converted
            else self.memory.latents.at[slot, :, columns]
        )

    def _change(self, target: Any, slot: jax.Array, seen: Any, parts: list[list[tuple[pl.Slice, pl.Slice]]]) -> None:
        """Each adding warpgroup's parts of a block to `target`: converted, unseen slots as 0."""
        for warpgroup, own in enumerate(parts):

            @pl.when(self.warpgroup == warpgroup)
            def _(own: list[tuple[pl.Slice, pl.Slice]] = own) -> None:
                for part in own:
                    values = mosaic.load_matrix(self.memory.latents.at[(slot, *part)], self.config.compute_dtype)
                    if seen is not None:
                        keep = mosaic.spread(seen(part[0].start), values.shape[1])
                        values = jnp.where(keep, values, jnp.zeros_like(values))
                    target[part] = values

        mosaic.fence()

    def slot(self, step: jax.Array) -> jax.Array:
        """Place of a step in the ring."""
        return lax.rem(step, jnp.int32(self.config.stages))

    def drain(self, num_steps: jax.Array) -> None:
        """Waits until all of `num_steps` steps have been read: no barrier may end in an open phase."""

        @pl.loop(lax.max(num_steps - self.config.stages, jnp.int32(0)), num_steps)
        def _(step: jax.Array) -> None:
            self.wait_free(self.slot(step))

    def wait_free(self, slot: jax.Array) -> None:
        """Waits until a slot has been read."""
        plgpu.barrier_wait(self.memory.free.at[slot])

    def wait_full(self, slot: jax.Array) -> None:
        """Waits until the copies into a slot have arrived."""
        plgpu.barrier_wait(self.memory.full.at[slot])

    def wait_weighed(self, slot: jax.Array) -> None:
        """Waits until the weights of a slot's block have been made."""
        plgpu.barrier_wait(self.memory.weighed.at[slot])

    def wait_changed(self) -> None:
        """Waits until both adding warpgroups have converted their half of a block."""
        plgpu.barrier_wait(self.memory.changed)

    def wait_idle(self) -> None:
        """Waits until both adding warpgroups have read the converted block before."""
        plgpu.barrier_wait(self.memory.idle)
