"""Attention of some query tiles in Triton: one program for a run of KV tiles and the rows of a KV head.

Flow:    query tiles, pages by block table -> [attend] -> out, lse by token

A query tile has `queries` tokens, a program's rows are those times some heads of one KV head. Two ways:

    whole     a program has a query tile and writes its result
    pieces    the KV tiles of all query tiles are shared out among lanes (`xla.lanes`); a program has a lane's, adds up
              one piece for each query tile that it meets, and `_merge` puts the pieces of a query tile together

Grid (query tiles or lanes, KV heads times parts of their heads). Logits, weights and states of a program stay in its
registers: what crosses memory is queries, the pages that a tile sees, results, and pieces (float32, Dv + 2 a row).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.places import PageNumbers, slabs_of
from pallas_kernels.key_share import KeyShare
from pallas_kernels.mask import MaskRule
from pallas_kernels.online_softmax import capped_sinks, finite
from pallas_kernels.schedule import QueryTile
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.triton.call import LEAST, Part, call, load, numbers, power_from, powers, product, store
from pallas_kernels.xla.lanes import Lanes

_MERGED_ROWS = LEAST  # of a program that merges
_NO_KEY = jnp.iinfo(jnp.int32).max  # position of a slot that holds no key


@dataclass(frozen=True)
class Sizes:
    """How much a program has at a time."""

    queries: int  # of a query tile
    heads: int  # of a KV head, of one program: a power of two
    keys: int  # of a KV tile: a power of two
    num_lanes: int | None  # None: a program has a query tile
    num_warps: int
    num_stages: int

    @property
    def rows(self) -> int:
        """Rows of a program's products."""
        return max(LEAST, power_from(self.queries * self.heads))


class Tokens(NamedTuple):
    """What a step's attention is of."""

    q: jax.Array  # [T, Hq, D] in the dtype of the products
    keys: jax.Array | SlabArray  # [pages, slots, Hkv, D or more], or without heads
    values: jax.Array | SlabArray | None  # [pages, slots, Hkv, Dv]; None: the first numbers of keys
    block_tables: jax.Array  # int32[S, P]
    scale: jax.Array  # float32[Hkv] of the logits
    v_scale: jax.Array  # float32[Hkv] of the results
    sinks: jax.Array | None  # [Hq]
    share: KeyShare | None


@dataclass(frozen=True)
class Rule:
    """Static options of a kernel."""

    keys: PageNumbers
    values: PageNumbers
    group: int  # query heads of a KV head
    mask: MaskRule
    soft_cap: float | None
    page_size: int
    dim_v: int
    values_are_keys: bool  # their first numbers
    context_size: int | None  # of a `KeyShare`; None: the pages hold whole sequences


class Refs(NamedTuple):
    """Arrays as a program sees them."""

    q: Any
    keys: Any  # [slabs, numbers]
    values: Any
    block_tables: Any
    scale: Any
    v_scale: Any
    sinks: Any  # float32[Hq]
    rank: Any  # int32[1]
    tiles: Any  # int32[C, fields of QueryTile]
    starts: Any  # int32[C] first KV tile of each query tile
    ends: Any  # int32[C]
    share: Any  # int32[1] KV tiles of a lane
    tiles_of_lanes: Any  # int32[lanes, 2] first query tile that a lane meets, one after the last


class Program(NamedTuple):
    """Which of the grid a program is, int32[] each but for its rows."""

    number: jax.Array  # of its query tile or lane
    row: jax.Array  # KV head and part of its heads
    kv_head: jax.Array
    first_head: jax.Array  # of the KV head's
    rows: jax.Array  # int32[n] its rows

    @classmethod
    def here(cls, rule: Rule, sizes: Sizes, num_rows: int) -> Program:
        """The one that asks."""
        row, num_parts = pl.program_id(1), -(-rule.group // sizes.heads)
        rows = pl.program_id(2) * num_rows + lax.iota(jnp.int32, num_rows)
        return cls(pl.program_id(0), row, row // num_parts, row % num_parts * sizes.heads, rows)


class Rows(NamedTuple):
    """The rows of a program, [rows] each."""

    token: jax.Array
    head: jax.Array  # query head
    pos: jax.Array
    is_real: jax.Array


State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # m, weight [rows], totals [rows, a part of Dv]


def attend(
    tokens: Tokens,
    tiles: QueryTile,  # int32[C] each
    results: tuple[jax.Array, jax.Array],  # out [T, Hq, Dv], lse float32[T, Hq]
    mask: MaskRule,
    soft_cap: float | None,
    page_size: int,
    sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:
    """`results` with those of the tiles' tokens."""
    dim_v = results[0].shape[-1]
    context_size = None if tokens.share is None else tokens.share.size
    num_kv_heads = tokens.scale.shape[0]
    group, values = tokens.q.shape[1] // num_kv_heads, tokens.keys if tokens.values is None else tokens.values
    rule = Rule(
        keys=PageNumbers.of(tokens.keys),
        values=PageNumbers.of(values),
        group=group,
        mask=mask,
        soft_cap=soft_cap,
        page_size=page_size,
        dim_v=dim_v,
        values_are_keys=tokens.values is None,
        context_size=context_size,
    )
    num_items = -(-tiles.num_pages * page_size // sizes.keys)
    num_tiles, num_lanes = tiles.seq.shape[0], sizes.num_lanes
    lanes = Lanes.of(num_items, num_lanes or num_tiles)
    inputs = [*_arguments(tokens), jnp.stack(tiles, axis=1), lanes.starts, lanes.ends, lanes.share.reshape(1)]
    num_parts = -(-group // sizes.heads)
    options: dict[str, Any] = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}

    def body(kernel: Callable[..., None], num_rows: int, *refs: Any) -> None:
        own = Refs(*refs[: len(Refs._fields)])
        kernel(own, refs[len(Refs._fields) :], Program.here(rule, sizes, num_rows), rule, sizes)

    if num_lanes is None:
        out, lse = call(
            functools.partial(body, _whole, sizes.rows),
            name="attend_whole",
            grid=(num_tiles, num_kv_heads * num_parts, 1),
            inputs=[*inputs, jnp.zeros((1, 2), jnp.int32)],
            outputs=[],
            in_place=results,
            **options,
        )
        return out, lse
    grid = (num_lanes, num_kv_heads * num_parts, 1)
    shape = (lanes.num_pieces, grid[1], sizes.rows)
    pieces = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2 + [jax.ShapeDtypeStruct((*shape, dim_v), jnp.float32)]
    inputs.append(_tiles_of_lanes(lanes))
    states = call(
        functools.partial(body, _lane, sizes.rows),
        name="attend_lanes",
        grid=grid,
        inputs=inputs,
        outputs=pieces,
        **options,
    )
    out, lse = call(
        functools.partial(body, _merge, _MERGED_ROWS),
        name="merge_pieces",
        grid=(num_tiles, grid[1], sizes.rows // _MERGED_ROWS),
        inputs=[*inputs, *states],
        outputs=[],
        in_place=results,
    )
    return out, lse


def _arguments(tokens: Tokens) -> list[jax.Array]:
    """Arrays of the first fields of `Refs`."""
    num_heads = tokens.q.shape[1]
    sinks = jnp.full(num_heads, -jnp.inf) if tokens.sinks is None else capped_sinks(tokens.sinks)
    rank = jnp.asarray(0 if tokens.share is None else tokens.share.rank, jnp.int32).reshape(1)
    keys, values = slabs_of(tokens.keys), slabs_of(tokens.keys if tokens.values is None else tokens.values)
    scales = (tokens.scale.astype(jnp.float32), tokens.v_scale.astype(jnp.float32))
    return [tokens.q, keys, values, tokens.block_tables, *scales, sinks, rank]


def _tiles_of_lanes(lanes: Lanes) -> jax.Array:
    """int32[lanes, 2] (first query tile that a lane meets, one after the last)."""
    first = jnp.arange(lanes.num_lanes, dtype=jnp.int32) * lanes.share
    last = jnp.minimum(first + lanes.share, lanes.ends[-1]) - 1
    tiles = jnp.sum(lanes.ends[None] <= jnp.stack([first, last])[..., None], axis=-1, dtype=jnp.int32)
    return jnp.stack([tiles[0], jnp.where(last < first, tiles[0], tiles[1] + 1)], axis=1)


def _whole(refs: Refs, written: tuple[Any, ...], program: Program, rule: Rule, sizes: Sizes) -> None:
    """A query tile."""
    number = program.number
    own, rows = _tile(refs, number, program, rule, sizes)
    state = _attend(refs, program, rule, sizes, own, rows, jnp.int32(0), refs.ends[number] - refs.starts[number])
    _write(refs, written, rule, rows, state)


def _lane(refs: Refs, pieces: tuple[Any, ...], program: Program, rule: Rule, sizes: Sizes) -> None:
    """The KV tiles of a lane."""
    lane, part = program.number, program.row
    begin = lane * refs.share[0]
    end = begin + refs.share[0]

    def attend_tile(number: jax.Array, carry: jax.Array) -> jax.Array:
        own, rows = _tile(refs, number, program, rule, sizes)
        start = refs.starts[number]
        first, last = jnp.maximum(begin, start) - start, jnp.minimum(end, refs.ends[number]) - start
        m, weight, totals = _attend(refs, program, rule, sizes, own, rows, first, last)
        piece, row = lane + number, program.rows
        store(pieces[0], (piece, part, row), m)
        store(pieces[1], (piece, part, row), weight)
        for dims, total in zip(powers(0, rule.dim_v), totals, strict=True):
            _store_columns(pieces[2], (piece, part, row[:, None]), dims, total)
        return carry

    lax.fori_loop(refs.tiles_of_lanes[lane, 0], refs.tiles_of_lanes[lane, 1], attend_tile, jnp.int32(0))


def _merge(refs: Refs, others: tuple[Any, ...], program: Program, rule: Rule, sizes: Sizes) -> None:
    """The pieces of a query tile."""
    (pieces, written), number, part = (others[:3], others[3:]), program.number, program.row
    _, rows = _tile(refs, number, program, rule, sizes)
    share, start, end = jnp.maximum(refs.share[0], 1), refs.starts[number], refs.ends[number]
    dims = powers(0, rule.dim_v)

    def add(lane: jax.Array, state: State) -> State:
        place = (lane + number, part, program.rows)
        m, weight = load(pieces[0], place), load(pieces[1], place)
        parts = [_load_columns(pieces[2], (*place[:2], program.rows[:, None]), x) for x in dims]
        top = jnp.maximum(state[0], m)
        kept, added = jnp.exp(state[0] - finite(top)), jnp.exp(m - finite(top))
        totals = [x * kept[:, None] + y * added[:, None] for x, y in zip(state[2], parts, strict=True)]
        return top, state[1] * kept + weight * added, tuple(totals)

    end_lane = jnp.where(end > start, (end - 1) // share + 1, 0)
    _write(refs, written, rule, rows, lax.fori_loop(start // share, end_lane, add, _empty(_MERGED_ROWS, dims)))


def _tile(refs: Refs, number: jax.Array, program: Program, rule: Rule, sizes: Sizes) -> tuple[QueryTile, Rows]:
    """(a query tile, the program's rows of it)."""
    own = QueryTile(*(refs.tiles[number, field] for field in range(len(QueryTile._fields))))
    row = program.rows
    query, head = row // sizes.heads, program.first_head + row % sizes.heads
    pos = own.first_pos + query
    is_real = (query < sizes.queries) & (head < rule.group) & (pos >= 0) & (pos <= own.last_pos)
    token = jnp.where(is_real, own.token + query, 0)
    return own, Rows(token, jnp.where(is_real, program.kv_head * rule.group + head, 0), pos, is_real)


def _empty(num_rows: int, dims: tuple[Part, ...]) -> State:
    totals = tuple(jnp.zeros((num_rows, part.room), jnp.float32) for part in dims)
    return jnp.full(num_rows, -jnp.inf, jnp.float32), jnp.zeros(num_rows, jnp.float32), totals


def _attend(
    refs: Refs,
    program: Program,
    rule: Rule,
    sizes: Sizes,
    own: QueryTile,
    rows: Rows,
    first: jax.Array,
    end: jax.Array,
) -> State:
    """State of the rows over KV tiles `first` to `end - 1` of a query tile."""
    head, dtype = program.kv_head, refs.q.dtype
    v_dims = powers(0, rule.dim_v)
    dim = refs.q.shape[-1]
    k_dims = v_dims + powers(rule.dim_v, dim - rule.dim_v) if rule.values_are_keys else powers(0, dim)
    place = (rows.token[:, None], rows.head[:, None])
    q = [_load_columns(refs.q, place, part, rows.is_real[:, None]) for part in k_dims]
    scale = refs.scale[head]

    def attend_keys(i: jax.Array, state: State) -> State:
        m, weight, totals = state
        page, slot, key_pos = _keys(refs, rule, own, i * sizes.keys, sizes.keys)
        seen = rule.mask.visible(key_pos, own.first_pos, own.last_pos, own.seq_len, own.sink_tokens)
        seen = seen[:, None]

        def of_keys(ref: Any, pages: PageNumbers, part: Part) -> jax.Array:
            heads = (head,) if len(pages.strides) == 3 else ()
            where = pages.at(page[:, None], slot[:, None], *heads, part.place[None])
            return numbers(load(ref, where, _within(part, seen)), dtype)

        k = [of_keys(refs.keys, rule.keys, part) for part in k_dims]
        s = sum(product(x, y.T) for x, y in zip(q, k, strict=True)) * scale
        if rule.soft_cap is not None:
            s = rule.soft_cap * _tanh(s / rule.soft_cap)
        s = jnp.where(_visible(rule, own, rows, key_pos), s, -jnp.inf)
        top = jnp.maximum(m, jnp.max(s, axis=1))
        p = jnp.exp(s - finite(top)[:, None])
        shrink, added = jnp.exp(m - finite(top)), jnp.sum(p, axis=1)
        v = k
        if not rule.values_are_keys:
            v = [of_keys(refs.values, rule.values, part) for part in v_dims]
        new = [
            jnp.where(added[:, None] == 0, total, total * shrink[:, None] + product(p.astype(dtype), x))
            for total, x in zip(totals, v[: len(v_dims)], strict=True)
        ]
        return top, weight * shrink + added, tuple(new)

    return lax.fori_loop(first, end, attend_keys, _empty(sizes.rows, v_dims))


def _keys(refs: Refs, rule: Rule, own: QueryTile, first: jax.Array, num_keys: int) -> tuple[jax.Array, ...]:
    """(pages, slots in them, positions) int32[num_keys] of what a query tile sees from its `first` key on."""
    key = first + lax.iota(jnp.int32, num_keys)
    number, slot = key // rule.page_size, key % rule.page_size
    column = own.run.column(number)
    named = number < own.num_pages
    page = load(refs.block_tables, (own.seq, jnp.where(named, column, 0)), named)
    pos = column * rule.page_size + slot
    if rule.context_size is not None:
        pos = KeyShare(refs.rank[0], rule.context_size).position(pos)
    return page, slot, jnp.where(named, pos, _NO_KEY)


def _visible(rule: Rule, own: QueryTile, rows: Rows, key_pos: jax.Array) -> jax.Array:  # bool[rows, keys]
    """Which keys a row sees."""
    key, pos = key_pos[None], rows.pos[:, None]
    return rule.mask.visible(key, pos, pos, own.seq_len, own.sink_tokens) & rows.is_real[:, None]


def _tanh(x: jax.Array) -> jax.Array:
    return 1.0 - 2.0 / (jnp.exp(2.0 * x) + 1.0)


def _write(refs: Refs, written: tuple[Any, ...], rule: Rule, rows: Rows, state: State) -> None:
    """Results of the rows, with their sinks."""
    m, weight, totals = state
    sink = load(refs.sinks, (rows.head,))
    nothing = weight == 0
    top = jnp.maximum(m, sink)
    shrink = jnp.exp(m - finite(top))
    weight = jnp.where(nothing, 1.0, weight * shrink + jnp.exp(sink - finite(top)))
    out, lse = written
    token = jnp.where(rows.is_real, rows.token, lse.shape[0])  # the interpreter writes what it does not, as it was
    store(lse, (token, rows.head), jnp.where(nothing, -jnp.inf, top + jnp.log(weight)), rows.is_real)
    factor = load(refs.v_scale, (rows.head // rule.group,)) * shrink / weight
    for dims, total in zip(powers(0, rule.dim_v), totals, strict=True):
        value = jnp.where(nothing[:, None], 0.0, total * factor[:, None])
        _store_columns(out, (token[:, None], rows.head[:, None]), dims, value, rows.is_real[:, None])


def _load_columns(ref: Any, place: tuple[Any, ...], part: Part, mask: Any = None) -> jax.Array:
    """A part of the vectors at `place`, 0 beyond its end."""
    return load(ref, (*place, part.place[None]), _within(part, mask))


def _store_columns(ref: Any, place: tuple[Any, ...], part: Part, value: jax.Array, mask: Any = None) -> None:
    store(ref, (*place, part.place[None]), value, _within(part, mask))


def _within(part: Part, mask: Any) -> Any:
    """`mask`, but nowhere beyond the end of a part; None: all."""
    inside = None if part.is_whole else (part.place < part.first + part.size)[None]
    return inside if mask is None else mask if inside is None else mask & inside
