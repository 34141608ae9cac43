"""States in slabs on TPU for code in jnp that reads and writes a few of them.

Flow:    SlabArray -> [by_dma] -> `states[pages]`, `states.at[pages].set(...)` -> [array_of] -> SlabArray

Plain `SlabArray`s are gathered row by row. Here kernels move states, by a DMA each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.page_ops import tpu_slabs
from pallas_kernels.slab_pages import SlabArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StatesByDma:
    """States [pages, *state] in slabs, indexed by pages as an array is."""

    array: SlabArray

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, *state]"""
        return self.array.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the numbers."""
        return self.array.dtype

    @property
    def at(self) -> _At:
        """As `jax.Array.at`."""
        return _At(self.array)

    def __getitem__(self, pages: jax.Array) -> jax.Array:
        found = tpu_slabs.gather_pages(self.array, jnp.reshape(pages, -1))
        return found.reshape(*jnp.shape(pages), *self.shape[1:])


@dataclass(frozen=True)
class _At:
    array: SlabArray

    def __getitem__(self, pages: jax.Array) -> _Items:
        return _Items(self.array, pages)


@dataclass(frozen=True)
class _Items:
    array: SlabArray
    pages: jax.Array  # int32[...]

    def set(self, values: jax.Array, mode: str) -> StatesByDma:
        """The states with `values` [..., *state] in int32[...] pages above 0, none twice; others are dropped."""
        assert mode == "drop", f"expected mode='drop', got {mode!r}"
        pages = jnp.reshape(self.pages, -1)
        pages = jnp.where(pages < self.array.shape[0], pages, -1)
        return StatesByDma(tpu_slabs.scatter_pages(self.array, pages, values.reshape(-1, *self.array.shape[1:])))


def by_dma(states: Any) -> Any:
    """The states, moved by DMAs if they lie in slabs."""
    return StatesByDma(states) if isinstance(states, SlabArray) else states


def array_of(states: Any) -> Any:
    """What `by_dma` was given."""
    return states.array if isinstance(states, StatesByDma) else states
