"""Prefill and mixed steps on the GPU: tiles of 128 query rows by KV blocks, three warpgroups.

Flow:    q, pages, tables + plan_tiles -> [prefill_tiles] -> out per token, LSE per row of a tile
Source:  warp specialisation as FlashAttention-3 (arXiv 2407.08608), heads of a group packed into the rows

Grid (tiles, KV heads x parts of their groups), the last tiles first, since they see the most keys where the mask is
causal; or (thread blocks), each with its share of all that, which fetches for the next tile while one is stored. Two
warpgroups attend 64 rows each, a third fetches KV blocks; where they need its registers, the first of them fetches,
before it attends a block, the last one that the ring has room for. Queries are read and results written where they
stand, [T, heads, D]: by box where a piece's tokens are all the tile's own, else token by token. Per tile and KV block
of n slots it reads n * (D + Dv) elements and does 2 * 128 * n * (D + Dv) flops: bound by the tensor cores.

Tokens of no tile are left as they come: undefined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.kv import KVRing, RingMemory, copy_sources
from pallas_kernels.gpu.places import PageView
from pallas_kernels.gpu.plan import LARGEST_FLOAT16, GpuConfig, Keys, block_slots
from pallas_kernels.gpu.softmax import (
    Reader,
    RowBounds,
    RowState,
    Turns,
    attend,
    capped_sink,
    of_head,
)
from pallas_kernels.gpu.tiles import TILE_ROWS, WARPGROUPS, TileField, TileShape
from pallas_kernels.layouts import cdiv

_FETCHING = WARPGROUPS  # the warpgroup after those that attend, if it is one of its own
_FETCHING_REGISTERS, _ATTENDING_REGISTERS = 40, 232
_SINKS_AT_ONCE = 8


def plain_columns(head_dim: int, head_dim_v: int) -> int:
    """Columns of queries and results that pass through untiled memory at a time, few where KV blocks need the room."""
    common, most = math.gcd(head_dim, head_dim_v), 128 if max(head_dim, head_dim_v) <= 128 else 64
    return max(columns for columns in range(16, most + 1, 16) if common % columns == 0)


def fixed_bytes(head_dim: int, head_dim_v: int) -> int:
    """Shared memory apart from KV blocks: queries and results; LSE, barriers and gaps before aligned arrays."""
    return TILE_ROWS * 2 * (head_dim + plain_columns(head_dim, head_dim_v)) + 5120


class Split(NamedTuple):
    """How a thread block is split."""

    fetches_apart: bool  # whether a warpgroup of its own fetches
    block: int  # slots of a KV block
    num_blocks: int | None = None  # thread blocks that go over all tiles, with `fetches_apart`; None: one for each tile

    @classmethod
    def of(cls, head_dim: int, head_dim_v: int, page_size: int, fetches_apart: bool | None = None) -> Split:
        """The default, or that of a given `fetches_apart`.

        Sums of 64 x more than 128 values need the third of the registers that a fetching warpgroup has. Where it gives
        the others none of its own, 128 scores a row fit beside sums of 96 values, and beside 128 without it; the few
        copies of large pages are then started by the way.
        """
        largest = max(head_dim, head_dim_v)
        if fetches_apart is None:
            is_free = not mosaic.MOVES_REGISTERS and largest <= 128 and page_size >= 64
            fetches_apart = head_dim_v <= 128 and not is_free
        is_small = fetches_apart and not mosaic.MOVES_REGISTERS and largest > 96
        return cls(fetches_apart, mosaic.ROWS if is_small else block_slots(head_dim, head_dim_v))


def prefill_tiles(
    q: jax.Array,  # [T, Hq, D], T at least the tokens of a tile
    pages: tuple[PageView, PageView],  # of K and V, entries [Hkv, D] and [Hkv, Dv]
    block_tables: jax.Array,  # int32[S, P]
    tiles: jax.Array,  # int32[tiles, fields] of plan_tiles
    scales: jax.Array,  # float32[1 or Hkv] of the keys
    sinks: jax.Array,  # float32[1 or Hq], -inf: none
    v_scale: jax.Array,  # float32[1 or Hkv]
    config: GpuConfig,
    split: Split,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dv] in q's dtype of the tokens of tiles, natural-log LSE float32[tiles, parts, 128] of rows)."""
    num_tokens, num_q_heads, _ = q.shape
    shape = TileShape.of(config.group)
    num_parts = num_q_heads // shape.heads
    rows, places = (WARPGROUPS, mosaic.ROWS), (pages[0].places, pages[1].places)
    grid = {"tile": tiles.shape[0], "part": num_parts}
    if split.num_blocks is not None:
        grid = {"block": min(split.num_blocks, tiles.shape[0] * num_parts)}

    def body(refs: _Refs) -> None:
        warpgroup = lax.axis_index("warpgroup")
        ring = KVRing(config, refs.tables, refs.k_pages, refs.v_pages, places, refs.ring, reader=warpgroup)

        def run(each: _Each) -> None:
            pl.when(warpgroup < WARPGROUPS)(lambda: _attend(refs, ring, shape, warpgroup, split.fetches_apart, each))
            if split.fetches_apart:
                pl.when(warpgroup == _FETCHING)(lambda: _fetch(refs, ring, shape, each))

        if split.num_blocks is not None:
            run(functools.partial(_share, refs, num_parts, grid["block"]))
            return
        tile = _Tile(jnp.int32(tiles.shape[0] - 1) - lax.axis_index("tile"), lax.axis_index("part"), 0)
        pl.when(tile.has_queries(refs))(lambda: run(functools.partial(_one, refs, tile)))

    results = call(
        body,
        _Refs,
        name=f"rpa_prefill_p{config.page_size}_b{config.block}",
        grid=grid,
        inputs={
            "q": q,
            "k_pages": pages[0].entries,
            "v_pages": pages[1].entries,
            "tables": block_tables,
            "tiles": tiles,
            "scales": scales,
            "sinks": sinks,
            "v_scale": v_scale,
        },
        outputs={
            "out": jax.ShapeDtypeStruct((num_tokens, num_q_heads, config.head_dim_v), q.dtype),
            "lse": jax.ShapeDtypeStruct((tiles.shape[0], num_parts, *rows), jnp.float32),
        },
        scratch={
            "q_tile": mosaic.tiled((*rows, config.head_dim), config.compute_dtype),
            "plain": plgpu.SMEM((*rows, plain_columns(config.head_dim, config.head_dim_v)), q.dtype),
            "lse_tile": plgpu.SMEM(rows, jnp.float32),
            "q_full": [plgpu.Barrier(num_arrivals=len(shape.pieces(n))) for n in range(WARPGROUPS)],
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
            "ring": RingMemory.of(config, num_readers=WARPGROUPS),
        },
        num_warpgroups=WARPGROUPS + split.fetches_apart,
    )
    return results["out"], results["lse"].reshape(tiles.shape[0], num_parts, TILE_ROWS)


class _Refs(NamedTuple):
    """References of a thread block."""

    q: Any  # [T, Hq, D]
    k_pages: Any  # [tokens, Hkv, D]
    v_pages: Any  # [tokens, Hkv, Dv]
    tables: Any  # int32[S, P]
    tiles: Any  # int32[tiles, fields]
    scales: Any  # float32[1 or Hkv]
    sinks: Any  # float32[1 or Hq]
    v_scale: Any  # float32[1 or Hkv]
    out: Any  # [T, Hq, Dv]
    lse: Any  # float32[tiles, parts, warpgroups, 64]
    q_tile: Any  # [warpgroups, 64, D]
    plain: Any  # [warpgroups, 64, columns] queries on their way in, results on their way out
    lse_tile: Any  # float32[warpgroups, 64]
    q_full: list[Any]  # barrier of each warpgroup: its queries have arrived
    turn: Any  # barrier of `Turns`
    ring: RingMemory


class _Tile(NamedTuple):
    """What a thread block attends at a time."""

    number: jax.Array  # of the table
    part: jax.Array  # of the query heads
    step: Any  # of the ring at its first KV block

    def has_queries(self, refs: _Refs) -> jax.Array:
        """bool[]: whether there is such a tile."""
        return refs.tiles[self.number, TileField.NUM_QUERIES] > 0

    def keys(self, refs: _Refs) -> Keys:
        """Its KV blocks."""
        return Keys(*(refs.tiles[self.number, TileField.KEYS + i] for i in range(len(Keys._fields))))


# (what is done with a tile) -> int32[] steps of the ring: does it with a thread block's tiles, one after the other.
_Each = Callable[[Callable[[_Tile], None]], jax.Array]


def _one(refs: _Refs, tile: _Tile, run: Callable[[_Tile], None]) -> jax.Array:
    """`_Each` of a thread block that has a tile."""
    run(tile)
    return tile.keys(refs).num_blocks


def _share(refs: _Refs, num_parts: int, num_blocks: int, run: Callable[[_Tile], None]) -> jax.Array:
    """`_Each` of one that has as many tiles as others, dealt there and back, since the last tiles see the most keys."""
    own, num_tiles = lax.axis_index("block"), refs.tiles.shape[0]

    def next_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        place = turn * num_blocks + jnp.where(turn % 2 == 0, own, num_blocks - 1 - own)
        number = lax.max(num_tiles - 1 - lax.div(place, jnp.int32(num_parts)), jnp.int32(0))
        tile = _Tile(number, lax.rem(place, jnp.int32(num_parts)), step)
        is_own = (place < num_tiles * num_parts) & tile.has_queries(refs)
        pl.when(is_own)(lambda: run(tile))
        return step + jnp.where(is_own, tile.keys(refs).num_blocks, 0)

    return lax.fori_loop(0, cdiv(num_tiles * num_parts, num_blocks), next_tile, jnp.int32(0))


def _heads(config: GpuConfig, shape: TileShape, tile: _Tile) -> tuple[jax.Array, jax.Array]:
    """(KV head, first query head) of a tile."""
    first = tile.part * shape.heads
    return lax.div(first, jnp.int32(config.group)), first


def _fetch(refs: _Refs, ring: KVRing, shape: TileShape, each: _Each) -> None:
    """The fetching warpgroup: KV blocks of its tiles."""
    plgpu.set_max_registers(_FETCHING_REGISTERS, action="decrease")
    ring.drain(each(functools.partial(_fetch_tile, refs, ring, shape)))


def _fetch_tile(refs: _Refs, ring: KVRing, shape: TileShape, tile: _Tile) -> None:
    """KV blocks of a tile."""
    keys, seq, head = tile.keys(refs), refs.tiles[tile.number, TileField.SEQ], _heads(ring.config, shape, tile)[0]

    @pl.loop(jnp.int32(0), keys.num_blocks)
    def _(i: jax.Array) -> None:
        ring.fetch(tile.step + i, seq, head, keys, keys.block(i))


def _attend(
    refs: _Refs, ring: KVRing, shape: TileShape, warpgroup: jax.Array, fetches_apart: bool, each: _Each
) -> None:
    """One of the attending warpgroups: its rows of its tiles."""
    if fetches_apart:
        plgpu.set_max_registers(_ATTENDING_REGISTERS, action="increase")
    each(functools.partial(_attend_tile, refs, ring, shape, warpgroup, fetches_apart))


def _attend_tile(
    refs: _Refs, ring: KVRing, shape: TileShape, warpgroup: jax.Array, fetches_apart: bool, tile: _Tile
) -> None:
    """Its rows of a tile."""
    config = ring.config
    keys = tile.keys(refs)
    head, first_q_head = _heads(config, shape, tile)
    scale = of_head(refs.scales, head) * config.score_factor

    def fetch(start: Callable[..., None], i: Any) -> None:
        """Starts the copies of K or V of the `i`-th block, if no other warpgroup does."""
        if fetches_apart:
            return
        keys = tile.keys(refs)

        @pl.when((warpgroup == 0) & (i < keys.num_blocks))
        def _() -> None:
            sources = copy_sources(config, ring.tables, refs.tiles[tile.number, TileField.SEQ], keys, keys.block(i))
            start(i, head, sources)

    ahead = config.stages - 1
    for i in range(ahead):
        fetch(ring.fetch_k, jnp.int32(i))
        fetch(ring.fetch_v, jnp.int32(i))
    sign = jnp.where(scale < 0, -1.0, 1.0)
    _load_queries(refs, config, shape, refs.tiles[tile.number, TileField.TOKEN], first_q_head, warpgroup, sign)
    reader = Reader(ring, refs.q_tile.at[warpgroup], scale * sign, is_positive=True)
    # Two warpgroups that convert a block together meet in each, and so cannot take turns; nor where values are masked.
    turns = None if config.is_converted else Turns(refs.turn, warpgroup)

    def attend_block(i: jax.Array, state: RowState, reader: Reader, bounds: RowBounds | None) -> RowState:
        fetch_k, fetch_v = (functools.partial(fetch, start, i + ahead) for start in (ring.fetch_k, ring.fetch_v))
        return attend(state, reader, tile.keys(refs), bounds, i, tile.step + i, fetch_k, fetch_v)

    def whole(i: jax.Array, state: RowState) -> RowState:
        return attend_block(i, state, reader._replace(turns=turns), None)

    def cut(i: jax.Array, state: RowState) -> RowState:
        token = lax.rem(mosaic.row_index(mosaic.ROWS) + warpgroup * mosaic.ROWS, jnp.int32(shape.tokens))
        pos = token + refs.tiles[tile.number, TileField.POS]
        bounds = RowBounds(config.mask.lower(pos), config.mask.upper(pos, refs.tiles[tile.number, TileField.SEQ_LEN]))
        return attend_block(i, state, reader, bounds)

    state = RowState.empty(config.head_dim_v)
    if turns is None:
        state = lax.fori_loop(0, keys.num_whole, whole, state)
    else:
        turns.begin()
        state = lax.fori_loop(0, keys.num_whole, whole, state)
        turns.end()
    state = lax.fori_loop(keys.num_whole, keys.num_blocks, cut, state)
    if not fetches_apart:
        pl.when(warpgroup == 0)(lambda: ring.drain(keys.num_blocks))
    out, lse = state.finish_with_sinks(_row_sinks(refs, shape, first_q_head, warpgroup))
    _store(refs, shape, tile, first_q_head, warpgroup, out * of_head(refs.v_scale, head), lse)


def _row_sinks(refs: _Refs, shape: TileShape, first_q_head: jax.Array, warpgroup: jax.Array) -> jax.Array:
    """The sink of each row's query head, few loaded at a time: beside the sums of a tile there is room for no more."""
    row = mosaic.row_index(mosaic.ROWS) + warpgroup * mosaic.ROWS
    sinks = mosaic.per_row(jnp.full((mosaic.ROWS,), -jnp.inf, jnp.float32))
    for head in range(shape.heads):
        if head and head % _SINKS_AT_ONCE == 0:
            first_q_head, sinks = lax.optimization_barrier((first_q_head, sinks))
        sinks = jnp.where(row >= head * shape.tokens, capped_sink(of_head(refs.sinks, first_q_head + head)), sinks)
    return sinks


def _load_queries(
    refs: _Refs, config: GpuConfig, shape: TileShape, token: jax.Array, first_q_head: jax.Array, warpgroup: jax.Array,
    sign: jax.Array,
) -> None:  # fmt: skip
    """Queries of one warpgroup times `sign`, by way of untiled memory: tiled copies begin at every eighth token."""
    columns = refs.plain.shape[-1]
    for start in range(0, config.head_dim, columns):
        for number in range(WARPGROUPS):

            @pl.when(warpgroup == number)
            def _(number: int = number, start: int = start) -> None:
                full = refs.q_full[number]
                for piece in shape.pieces(number):
                    tokens, part = pl.ds(token + piece.token, piece.num_rows), pl.ds(start, columns)
                    source = refs.q.at[tokens, first_q_head + piece.head, part]
                    plgpu.copy_gmem_to_smem(source, refs.plain.at[number, pl.ds(piece.row, piece.num_rows)], full)
                plgpu.barrier_wait(full)

        queries = mosaic.load_matrix(refs.plain.at[warpgroup], jnp.float32) * sign
        if config.compute_dtype == "float16":
            queries = lax.min(lax.max(queries, -LARGEST_FLOAT16), LARGEST_FLOAT16)
        refs.q_tile[warpgroup, :, pl.ds(start, columns)] = queries.astype(config.compute_dtype)
        mosaic.fence()


def _store(
    refs: _Refs, shape: TileShape, tile: _Tile, first_q_head: jax.Array, warpgroup: jax.Array, out: Any, lse: Any
) -> None:
    """Stores the rows of one warpgroup, a part of the columns at a time."""
    columns = refs.plain.shape[-1]
    for start in range(0, out.shape[1], columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.store_plain(refs.plain.at[warpgroup], out[:, start : start + columns].astype(refs.out.dtype))
        if start == 0:
            refs.lse_tile[warpgroup] = lse
        plgpu.commit_smem()
        if start == 0:
            target = refs.lse.at[tile.number, tile.part, warpgroup]
            plgpu.copy_smem_to_gmem(refs.lse_tile.at[warpgroup], target)
        for number in range(WARPGROUPS):
            store = functools.partial(_store_pieces, refs, shape, tile, first_q_head, number, pl.ds(start, columns))
            pl.when(warpgroup == number)(store)
    plgpu.wait_smem_to_gmem(0)


def _store_pieces(
    refs: _Refs, shape: TileShape, tile: _Tile, first_q_head: jax.Array, warpgroup: int, columns: Any
) -> None:
    """Starts the copies of the tile's own tokens to where they stand in `out`."""
    token, skip = refs.tiles[tile.number, TileField.TOKEN], refs.tiles[tile.number, TileField.SKIP]
    end = skip + refs.tiles[tile.number, TileField.NUM_QUERIES]
    for piece in shape.pieces(warpgroup):
        first = lax.min(lax.max(skip - piece.token, jnp.int32(0)), jnp.int32(piece.num_rows))
        last = lax.min(lax.max(end - piece.token, jnp.int32(0)), jnp.int32(piece.num_rows))
        is_whole = last - first == piece.num_rows
        place, head = token + piece.token, first_q_head + piece.head

        def by_box(piece: Any = piece, place: Any = place, head: Any = head) -> None:
            source = refs.plain.at[warpgroup, pl.ds(piece.row, piece.num_rows)]
            plgpu.copy_smem_to_gmem(source, refs.out.at[pl.ds(place, piece.num_rows), head, columns])

        def by_token(piece: Any = piece, place: Any = place, head: Any = head, rows: Any = (first, last)) -> None:
            @pl.loop(*rows)
            def _(i: jax.Array) -> None:
                source = refs.plain.at[warpgroup, pl.ds(piece.row + i, 1)]
                plgpu.copy_smem_to_gmem(source, refs.out.at[pl.ds(place + i, 1), head, columns])

        pl.when(is_whole)(by_box)
        pl.when(~is_whole)(by_token)
