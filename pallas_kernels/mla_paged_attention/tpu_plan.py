"""Static sizes of one launch of latent attention on TPU, and the walk of its steps over the blocks of all items.

Flow:    shapes + options -> [LatentConfig];  item table in SMEM -> [Walk] -> Step: which blocks run together

The blocks of all items stand in one line, item after item. A *unit* is one block of it; a *step* attends `units`
successive ones, of one sequence or of several, so that every step is full but the last, however ragged the lengths.
Units beyond the end of the line see nothing.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mask import MaskRule
from pallas_kernels.tpu.item_plan import Field
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.mosaic import LANES, SUBLANES


@dataclass(frozen=True)
class LatentConfig:
    """Static description of one launch; an `ItemSizes`."""

    mask: MaskRule
    sm_scale: float
    soft_cap: float | None
    heads: int  # query heads, padded to whole sublanes
    head_dim: int  # numbers of a state
    lanes: int  # of a state in the pages, a multiple of 128
    value_lanes: int  # of its values, which are its first numbers
    page_size: int
    compute_dtype: str  # of the matrix products' operands: bfloat16 or float32
    queries: int  # most query tokens of an item; 1: decode
    units: int  # blocks of a step; 1 unless decoding
    block: int  # slots of a KV block
    part: int  # slots of one softmax update
    chunk: int  # query tokens of one matrix product
    ahead: int  # products whose scores are computed before the softmax of an earlier one
    buffers: int  # steps in VMEM, a power of two: one that is attended, the others under way
    has_sinks: bool
    has_k_scale: bool
    return_lse: bool
    table_stride: int
    tables_in_hbm: bool
    context_size: int | None  # ranks that share the tokens; None: the pages hold whole sequences

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        return self.block // self.page_size

    @property
    def rows(self) -> int:
        """Rows of one matrix product's queries."""
        return self.chunk * self.heads

    @property
    def num_chunks(self) -> int:
        """Matrix products that cover an item's queries."""
        return self.queries // self.chunk

    @property
    def window(self) -> int:
        """Query tokens that a step has at hand: a tile, or as many as its units may be of."""
        return max(self.queries, self.units)

    @property
    def num_rows(self) -> int:
        """Rows of the block tables in scalar memory, where tables are in HBM: of the units of two steps."""
        return 2 * self.units


def padded_heads(num_heads: int) -> int:
    """Heads as the kernel holds them: whole sublanes."""
    return -(-num_heads // SUBLANES) * SUBLANES


def whole_lanes(count: int) -> int:
    """Lanes that hold `count` numbers."""
    return -(-count // LANES) * LANES


class Unit(NamedTuple):
    """One block."""

    item: jax.Array  # int32[]
    step: jax.Array  # int32[] number of the block in the item, in the order they run


class Step(NamedTuple):
    """What one trip of the kernel's loop attends."""

    units: tuple[Unit, ...]
    token: jax.Array  # int32[] first query token of those at hand
    slot: jax.Array  # int32[] their buffer
    is_new: jax.Array  # bool[] they are not those of the step before


@dataclass(frozen=True)
class Walk:
    """The steps of one launch."""

    config: LatentConfig
    items: ItemTable
    num_items: jax.Array
    num_tokens: int  # of the array of queries

    def first(self) -> Step:
        """The first step."""
        zero = jnp.int32(0)
        units = self._units(Unit(zero, zero))
        return Step(units, self._token(units), zero, jnp.bool_(True))

    def following(self, step: Step) -> Step:
        """The step after `step`."""
        units = self._units(self._next(step.units[-1]))
        token = self._token(units)
        is_new = token != step.token
        slot = (step.slot + is_new.astype(jnp.int32)) & (self.config.buffers - 1)
        return Step(units, token, slot, is_new)

    def is_end(self, unit: Unit) -> jax.Array:
        """Whether an item ends with the unit."""
        return unit.step + 1 == self.items.field(Field.NUM_BLOCKS, unit.item)

    def is_full(self, step: Step) -> jax.Array:
        """Whether every row sees all slots of all units."""
        full = (unit.step < self.items.field(Field.NUM_FULL, unit.item) for unit in step.units)
        return functools.reduce(operator.and_, full)

    def place(self, step: Step, unit: Unit) -> jax.Array | int:
        """Where the unit's queries begin among those at hand."""
        return 0 if self.config.units == 1 else self.items.field(Field.TOKEN, unit.item) - step.token

    def _units(self, unit: Unit) -> tuple[Unit, ...]:
        units = [unit]
        while len(units) < self.config.units:
            units.append(self._next(units[-1]))
        return tuple(units)

    def _next(self, unit: Unit) -> Unit:
        is_last = unit.step + 1 >= self.items.field(Field.NUM_BLOCKS, unit.item)
        moves = is_last & (unit.item + 1 < self.num_items)
        return Unit(jnp.where(moves, unit.item + 1, unit.item), jnp.where(moves, 0, unit.step + 1))

    def _token(self, units: tuple[Unit, ...]) -> jax.Array:
        """Decoding sequences have one token each, one after the other."""
        token = self.items.field(Field.TOKEN, units[0].item)
        return jnp.minimum(token, self.num_tokens - self.config.window)
