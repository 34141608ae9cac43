"""What a launch over `TokenBlocks` reads and writes: rows of heads, single tokens, rows of block tables.

Flow:    TokenBlocks -> [row_specs], [token_spec], [table_spec] -> the BlockSpecs of a pallas_call

Results of an item are written in the step behind it, so specs of rows and tokens are those of the item before a step's
own number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.mosaic import LANES, Ref
from pallas_kernels.tpu.token_blocks import TILE_QUERIES, Field, TokenBlocks

MOST_ROWS = 128  # of a matrix product: rows of a block are those of its tokens' heads, heads innermost
_LEAST_HEADS = 16  # two tiles of float32, one of bfloat16


def row_specs(blocks: TokenBlocks, num_rows: int) -> Callable[[int], pl.BlockSpec]:
    """lanes -> spec of `num_rows` rows a block of tokens."""
    return lambda lanes: pl.BlockSpec((num_rows, lanes), lambda w, items, *_: (_block(blocks, w, items), 0))


def token_spec(blocks: TokenBlocks, queries: int, lanes: int) -> pl.BlockSpec:
    """`queries` tokens of [T, 1, lanes] a block."""
    return pl.BlockSpec((queries, 1, lanes), lambda w, items, *_: (_block(blocks, w, items), 0, 0))


def _block(blocks: TokenBlocks, w: jax.Array, items: Ref) -> jax.Array:
    return items[Field.BLOCK * blocks.room + jnp.maximum(w - 1, 0)]


def table_spec(blocks: TokenBlocks, size: int, ahead: int) -> pl.BlockSpec:
    """A sequence's row of int32[S, 1, size] in scalar memory: of the item before (`ahead` 0) or the own (1)."""
    room = blocks.room

    def index(w: jax.Array, items: Ref, *_: Any) -> tuple[Any, int, int]:
        return items[Field.SEQ * room + jnp.clip(w - 1 + ahead, 0, room - 1)], 0, 0

    return pl.BlockSpec((1, 1, size), index, memory_space=pltpu.SMEM)


def rows_of_tables(tables: jax.Array) -> jax.Array:
    """int32[S, 1, n] of int32[S, P]: rows for scalar memory."""
    return jnp.pad(tables, [(0, 0), (0, -tables.shape[1] % LANES)])[:, None]


def padded_heads(num_heads: int) -> int:
    """A power of two that fills whole tiles."""
    return max(_LEAST_HEADS, 1 << (num_heads - 1).bit_length())


def rows_of_heads(x: jax.Array) -> jax.Array:
    """[T * heads, lanes] of [T, heads, lanes], tokens padded to whole blocks, heads by `padded_heads`."""
    padding = [(0, -x.shape[0] % TILE_QUERIES), (0, padded_heads(x.shape[1]) - x.shape[1]), (0, 0)]
    return jnp.pad(x, padding).reshape(-1, x.shape[2])
