"""Blocks of latents on the GPU: a ring in shared memory that two warpgroups read, one of which also fills it.

Flow:    latent pages + block tables + Keys -> [LatentRing.fetch] -> ring -> [take] -> keys, and values, of products

A block is keys and values at once, so that it is read from memory once and both warpgroups, which share the columns of
the values, use the same one. It goes to slot `step % stages`:

    full    the bulk copies arrive; both warpgroups wait
    free    both arrive once they have read the slot; the first one, which fetches, waits before it refills it
    changed both have done their half of a change: slots that nobody sees set to 0, or 8-bit values converted
    idle    both have read the converted block before, which the next change overwrites
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.ragged_paged_attention.gpu_kv import block_parts, copy_sources
from pallas_kernels.ragged_paged_attention.gpu_plan import GpuConfig, Keys

WARPGROUPS = 2


@dataclass(frozen=True)
class LatentRing:
    """References of one kernel."""

    config: GpuConfig
    tables: Any  # int32[S, P] block tables, in global memory
    pages: Any  # [pages, page_size, D]
    latents: Any  # [stages, block, D] shared memory
    full: Any
    free: Any
    changed: Any
    reader: Any  # int32[] this warpgroup
    converted: Any = None  # [block, D] in the compute dtype, where pages hold 8-bit values
    idle: Any = None

    @classmethod
    def of(cls, config: GpuConfig, references: dict[str, Any], reader: Any) -> LatentRing:
        """The ring among a kernel's references by name, for one warpgroup."""
        names = {field.name for field in fields(cls)}
        return cls(config, **{name: value for name, value in references.items() if name in names}, reader=reader)

    @classmethod
    def scratch(cls, config: GpuConfig) -> dict[str, Any]:
        """Shared memory and barriers by field."""
        scratch = {
            "latents": mosaic_gpu.tiled((config.stages, config.block, config.head_dim), config.page_dtype),
            "full": plgpu.Barrier(num_arrivals=config.num_copies, num_barriers=config.stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
            "changed": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }
        if config.is_converted:
            scratch["converted"] = mosaic_gpu.tiled((config.block, config.head_dim), config.compute_dtype)
            scratch["idle"] = plgpu.Barrier(num_arrivals=WARPGROUPS)
        return scratch

    def fetch(self, step: jax.Array, seq: jax.Array, keys: Keys, block: jax.Array) -> None:
        """Starts the copies of a block of one sequence, once its slot is free."""
        slot, copy = self.slot(step), self.config.copy_slots
        pl.when(step >= self.config.stages)(lambda: self.wait_free(slot))
        for i, (page, offset) in enumerate(copy_sources(self.config, self.tables, seq, keys, block)):
            target = self.latents.at[slot, pl.ds(i * copy, copy)]
            plgpu.copy_gmem_to_smem(self.pages.at[page, pl.ds(offset, copy)], target, self.full.at[slot])

    def take(self, step: jax.Array, seen: Any) -> Any:
        """The block [block, D] of a step, ready for products; call `release` when done with it.

        `seen(first_row)` tells which of the 64 slots from `first_row` on any query sees, bool[64]: the others become 0,
        since what stands there may be NaN. None: all are seen.
        """
        slot = self.slot(step)
        self.wait_full(slot)
        if not self.config.is_converted and seen is None:
            return self.latents.at[slot]
        if self.config.is_converted:
            plgpu.barrier_arrive(self.idle)
            self.wait_idle()
        target = self.converted if self.config.is_converted else self.latents.at[slot]
        for reader in range(WARPGROUPS):

            @pl.when(self.reader == reader)
            def _(reader: int = reader) -> None:
                for part in block_parts(self.config, self.config.head_dim)[reader::WARPGROUPS]:
                    values = mosaic_gpu.load_matrix(self.latents.at[(slot, *part)], self.config.compute_dtype)
                    if seen is not None:
                        keep = mosaic_gpu.spread(seen(part[0].start), values.shape[1])
                        values = jnp.where(keep, values, jnp.zeros_like(values))
                    target[part] = values

        mosaic_gpu.fence()
        plgpu.barrier_arrive(self.changed)
        self.wait_changed()
        return target

    def release(self, step: jax.Array) -> None:
        """Says that this warpgroup has read the block of a step."""
        plgpu.barrier_arrive(self.free.at[self.slot(step)])

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
        plgpu.barrier_wait(self.free.at[slot])

    def wait_full(self, slot: jax.Array) -> None:
        """Waits until the copies into a slot have arrived."""
        plgpu.barrier_wait(self.full.at[slot])

    def wait_changed(self) -> None:
        """Waits until both warpgroups have done their half of a change."""
        plgpu.barrier_wait(self.changed)

    def wait_idle(self) -> None:
        """Waits until both warpgroups have read the converted block before."""
        plgpu.barrier_wait(self.idle)
