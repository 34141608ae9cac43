"""ring_scan for TPU, held tokens: a sequence a step, whose base state and ring are read and whose state stays.

Flow:    pages of states and rings, c and entries of the new tokens -> [launch] -> sums over base and ring, pages

Grid: sequences x tiles of heads. A step loads a tile of the state while the one before is computed, and with the first
tile the held part of the ring. It stores a tile only where the sequence writes its state, and with the last one copies
the entries of the new tokens to their slots. Bytes of a sequence: a state read, the held slots read, the new slots
written; HBM binds.

Slots are whole rows of 128 lanes. The inputs of a row are of `k = 128 / P` heads. Weights of slots are made by lanes of
heads, transposed once a sequence, and read with a stride of k, so that rows of inputs and of weights meet. A matrix
product takes c and the base state, another one inputs and b, which has inputs in parts that make it exact.
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ring_step import RingStep
from pallas_kernels.ssm_update.tpu_decode import split
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.decode_states import largest_divisor
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Copy, Ref

_BUFFER_BYTES = 4 << 20  # of a tile of states, of four
_ROWS = 16  # of inputs that go together
_ROWS_TOGETHER = 4  # of a state, whose products hide each other's latency
_PRODUCT_ROWS = 512  # of a base state in one matrix product
_LEAST_LOG = -110.0  # of a decay, beyond which its exponential is 0


class HeldSums(NamedTuple):
    """Of each sequence; anything where it does nothing."""

    base: jax.Array  # float32[S, M, H, P] base states times c
    ring: jax.Array  # float32[S, M, H, P] sums over the held tokens
    kept: jax.Array  # float32[S, H] what the held tokens leave of the base state


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, and how the kernel cuts them."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    slots: int
    new: int  # most new tokens of a sequence
    tile: int  # heads

    @property
    def per_group(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def per_row(self) -> int:
        """Heads of a row of lanes."""
        return LANES // self.head_dim

    @property
    def num_tiles(self) -> int:
        """Tiles of heads."""
        return self.heads // self.tile

    @property
    def tile_rows(self) -> int:
        """Rows of inputs of a tile."""
        return self.tile // self.per_row

    @property
    def lane_blocks(self) -> int:
        """Rows of 128 heads."""
        return -(-self.heads // LANES)


def tile_of(heads: int, groups: int, head_dim: int, state_bytes: int) -> int | None:
    """Heads of a tile: all, or as many as fill a buffer and lie in one row of 128 heads; None: no number does."""
    per_group, per_row = heads // groups, LANES // head_dim

    def fits(n: int) -> bool:
        is_part = n == heads or (n // per_row) % _ROWS == 0
        in_groups = n % per_group == 0 or per_group % n == 0
        return is_part and in_groups and (heads <= LANES or LANES % n == 0) and n * state_bytes <= _BUFFER_BYTES

    return max((n for n in range(per_row, heads + 1, per_row) if heads % n == 0 and fits(n)), default=None)


class Entries(NamedTuple):
    """What the new tokens put into their slots."""

    xs: Any  # [S * M, *slot]
    dts: Any
    bs: Any


class _Ring(NamedTuple):
    """The held part of two sequences' rings, in VMEM."""

    xs: Ref  # [2, R, rows, 128]
    dts: Ref  # float32[2, R, rows, 128]
    bs: Ref  # [2, R, rows, 128]


class _Spread(NamedTuple):
    """What a sequence's ring becomes, float32; slots without a token are 0."""

    weights: Ref  # [heads, 128] of outputs, lane i * R + j: of new token i and slot j
    shares: Ref  # [lane blocks * R, 128] of the state, by lanes of heads
    xs: Ref  # [rows of a tile * R, 128] inputs, slots inner
    bs: Ref  # [rows * R, 128] b, slots inner


class _Arrivals(NamedTuple):
    """Semaphores of DMAs."""

    state: Ref  # of two buffers
    ring: Ref  # of two buffers
    left: Ref  # of two buffers
    entries: Ref


class _Refs(NamedTuple):
    """References of a step."""

    read: Ref  # SMEM int32[S] page
    held: Ref  # SMEM int32[S] tokens in its ring
    state_page: Ref  # SMEM int32[S] page of the state after them, 0: none
    ring_page: Ref  # SMEM int32[S] page of the new tokens, 0: none
    first_slot: Ref  # SMEM int32[S]
    num_new: Ref  # SMEM int32[S]
    a: Ref  # float32[lane blocks, 128]
    c: Ref  # float32[1, G, 8 * M, N] of eight sequences
    entries: Entries  # HBM
    base: Ref  # float32[1, 8 * M, H * P] of eight sequences
    ring: Ref  # float32[1, M, rows, 128]
    kept: Ref  # float32[1, lane blocks, 128]
    pages: tuple[Ref, ...]  # HBM: states, xs, dts, bs
    coming: Ref  # [2, tile, P, N]
    going: Ref
    rings: _Ring
    spread: _Spread
    arrivals: _Arrivals


def launch(
    pages: tuple[jax.Array, ...],  # states, xs, dts, bs; or their column of slabs
    step: RingStep,
    num_seqs: jax.Array,  # int32[] real ones
    a: jax.Array,  # float32[H]
    c: jax.Array,  # float32[S, M, G, N]
    entries: Entries,
    head_dim: int,
) -> tuple[HeldSums, tuple[jax.Array, ...]]:
    """(sums of the sequences, pages with states and entries written)."""
    states, xs, dts, bs = (pages[i] for i in range(4))
    rows, new, groups, state_dim = c.shape
    heads, slots = a.shape[0], xs.shape[1]
    tile = tile_of(heads, groups, head_dim, head_dim * state_dim * states.dtype.itemsize)
    assert tile is not None, "expected a call that reason_not_supported lets pass"
    shape = Shape(heads, head_dim, state_dim, groups, slots, new, tile)
    blocks, lanes = shape.lane_blocks, heads * head_dim
    padded = jnp.pad(a, (0, blocks * LANES - heads)).reshape(blocks, LANES)
    eights = -(-rows // SUBLANES)  # of sequences
    factors = jnp.pad(c, [(0, eights * SUBLANES - rows), (0, 0), (0, 0), (0, 0)])
    factors = jnp.moveaxis(factors.reshape(eights, SUBLANES * new, groups, state_dim), 1, 2)

    def of_eight(*size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *size), lambda s, j, *_: (lax.div(s, SUBLANES), *[0] * len(size)))

    does = (step.num_new > 0) | (step.state_page > 0)
    of_two = pltpu.SemaphoreType.DMA((2,))
    state_tile = pltpu.VMEM((2, tile, head_dim, state_dim), states.dtype)

    def vmem(*size: int) -> Any:
        return pltpu.VMEM(size, jnp.float32)

    def output(*size: int) -> Operand:
        spec = pl.BlockSpec((1, *size), lambda s, j, *_: (s, *[0] * len(size)))
        return Operand(jax.ShapeDtypeStruct((rows, *size), jnp.float32), spec)

    results = call(
        functools.partial(_step, shape=shape, dtype=bs.dtype),
        _Refs,
        name=f"ring_scan_h{tile}",
        grid=(num_seqs, shape.num_tiles),
        scalars={
            "read": jnp.where(does, step.read, 0),
            "held": step.held,
            "state_page": step.state_page,
            "ring_page": step.ring_page,
            "first_slot": step.first_slot,
            "num_new": step.num_new,
        },
        inputs={
            "a": Operand(padded, pl.BlockSpec(padded.shape, lambda s, j, *_: (0, 0))),
            "c": Operand(factors, of_eight(*factors.shape[1:])),
            "entries": Entries(*(Operand(x, IN_HBM) for x in entries)),
        },
        outputs={
            "base": Operand(
                jax.ShapeDtypeStruct((eights, SUBLANES * new, lanes), jnp.float32), of_eight(SUBLANES * new, lanes)
            ),
            "ring": output(new, lanes // LANES, LANES),
            "kept": output(blocks, LANES),
        },
        in_place={"pages": pages},
        scratch={
            "coming": state_tile,
            "going": state_tile,
            "rings": _Ring(*(pltpu.VMEM((2, *x.shape[1:]), x.dtype) for x in (xs, dts, bs))),
            "spread": _Spread(
                weights=vmem(blocks * LANES, LANES),
                shares=vmem(blocks * slots, LANES),
                xs=vmem(shape.tile_rows * slots, LANES),
                bs=vmem(bs.shape[2] * slots, LANES),
            ),
            "arrivals": _Arrivals(of_two, of_two, of_two, pltpu.SemaphoreType.DMA),
        },
        vmem_limit_bytes=40 << 20,
    )
    by_head = (new, heads, head_dim)
    base = results["base"].reshape(-1, *by_head)[:rows]
    kept = results["kept"].reshape(rows, -1)[:, :heads]
    return HeldSums(base, results["ring"].reshape(rows, *by_head), kept), results["pages"]


def _step(refs: _Refs, *, shape: Shape, dtype: jnp.dtype) -> None:
    """A tile of heads of a sequence; `dtype`: of the matrix products' operands."""
    moves = _Moves(refs, shape)
    seq, tile = pl.program_id(0), pl.program_id(1)
    is_last_tile = tile == shape.num_tiles - 1
    moves.begin()
    pl.when(tile == 0)(lambda: _spread_ring(refs, shape, seq))
    _base_sums(refs, shape, dtype)
    _ring_sums(refs, shape)
    pl.when(refs.state_page[seq] > 0)(lambda: _move_state(refs, shape, dtype))
    pl.when(is_last_tile)(moves.put_entries)
    moves.end()


@dataclass(frozen=True)
class _Moves:
    """The DMAs of the step that runs, which is `seq * num_tiles + tile`."""

    refs: _Refs
    shape: Shape

    @property
    def _now(self) -> jax.Array:
        return pl.program_id(0) * self.shape.num_tiles + pl.program_id(1)

    @property
    def _num_steps(self) -> jax.Array | int:
        return pl.num_programs(0) * self.shape.num_tiles

    def begin(self) -> None:
        """Loads for the next step, and waits for what this one reads."""
        now, seq = self._now, pl.program_id(0)
        next_seq = lax.div(now + 1, self.shape.num_tiles)

        @pl.when(now == 0)
        def _() -> None:
            self._load_state(now)
            self._each_of_ring(seq, lambda copy: copy.start())

        pl.when(now + 1 < self._num_steps)(lambda: self._load_state(now + 1))

        @pl.when((next_seq > seq) & (next_seq < pl.num_programs(0)))
        def _() -> None:
            self._each_of_ring(next_seq, lambda copy: copy.start())

        pl.when(self.refs.read[seq] > 0)(lambda: self._loading(now).wait())
        pl.when(pl.program_id(1) == 0)(lambda: self._each_of_ring(seq, lambda copy: copy.wait()))
        pl.when(now > 1)(lambda: self._wait_for_store(now - 2))

    def end(self) -> None:
        """Stores the state that the step left in `going`; the last step waits for all that is under way."""
        now, seq = self._now, pl.program_id(0)
        pl.when(self.refs.state_page[seq] > 0)(lambda: self._storing(now).start())

        @pl.when(now + 1 == self._num_steps)
        def _() -> None:
            pl.when(now > 0)(lambda: self._wait_for_store(now - 1))
            self._wait_for_store(now)
            self._each_entry(seq, lambda copy: copy.wait())

    def put_entries(self) -> None:
        """Copies the new tokens' entries to their slots, once those of the sequence before are there."""
        seq = pl.program_id(0)
        pl.when(seq > 0)(lambda: self._each_entry(seq - 1, lambda copy: copy.wait()))
        self._each_entry(seq, lambda copy: copy.start())

    def _load_state(self, step: jax.Array) -> None:
        page = self.refs.read[lax.div(step, self.shape.num_tiles)]
        pl.when(page > 0)(lambda: self._loading(step).start())

        @pl.when(page == 0)
        def _() -> None:
            self.refs.coming[step & 1] = jnp.zeros(self.refs.coming.shape[1:], self.refs.coming.dtype)

    def _loading(self, step: jax.Array) -> Copy:
        slot = step & 1
        source = self._tile(self.refs.read, step)
        return pltpu.make_async_copy(source, self.refs.coming.at[slot], self.refs.arrivals.state.at[slot])

    def _storing(self, step: jax.Array) -> Copy:
        slot = step & 1
        target = self._tile(self.refs.state_page, step)
        return pltpu.make_async_copy(self.refs.going.at[slot], target, self.refs.arrivals.left.at[slot])

    def _wait_for_store(self, step: jax.Array) -> None:
        page = self.refs.state_page[lax.div(step, self.shape.num_tiles)]
        pl.when(page > 0)(lambda: self._storing(step).wait())

    def _tile(self, pages: Ref, step: jax.Array) -> Ref:
        seq = lax.div(step, self.shape.num_tiles)
        first = (step - seq * self.shape.num_tiles) * self.shape.tile
        return self.refs.pages[0].at[pages[seq], pl.ds(pl.multiple_of(first, self.shape.tile), self.shape.tile)]

    def _each_of_ring(self, seq: jax.Array, some: Callable[[Copy], Any]) -> None:
        """`some` of the copies of the held part of a sequence's ring."""
        page, count, slot = self.refs.read[seq], self.refs.held[seq], seq & 1

        @pl.when(count > 0)
        def _() -> None:
            for source, target in zip(self.refs.pages[1:], self.refs.rings, strict=True):
                part = target.at[slot, pl.ds(0, count)]
                some(pltpu.make_async_copy(source.at[page, pl.ds(0, count)], part, self.refs.arrivals.ring.at[slot]))

    def _each_entry(self, seq: jax.Array, some: Callable[[Copy], Any]) -> None:
        """`some` of the copies of a sequence's entries."""
        page, first = self.refs.ring_page[seq], self.refs.first_slot[seq]
        count = jnp.where(page > 0, self.refs.num_new[seq], 0)

        def one(i: jax.Array, carry: None) -> None:
            for source, target in zip(self.refs.entries, self.refs.pages[1:], strict=True):
                entry = source.at[seq * self.shape.new + i]
                some(pltpu.make_async_copy(entry, target.at[page, first + i], self.refs.arrivals.entries))
            return carry

        lax.fori_loop(0, count, one, None)


def _spread_ring(refs: _Refs, shape: Shape, seq: jax.Array) -> None:
    """Makes of the ring what outputs and states need: weights, shares, and b by slots."""
    slots, buffer, held = shape.slots, seq & 1, refs.held[seq]
    rows = refs.rings.bs.shape[2]
    for j in range(slots):
        b = refs.rings.bs[buffer, j].astype(jnp.float32)
        refs.spread.bs[pl.ds(j, rows, stride=slots), :] = jnp.where(j < held, b, 0.0)
    slot = lax.broadcasted_iota(jnp.int32, (slots, LANES), 0)
    for block in range(shape.lane_blocks):
        steps = jnp.where(slot < held, refs.rings.dts[buffer, :, block, :], 0.0)
        logs = jnp.maximum(steps * refs.a[block : block + 1, :], _LEAST_LOG)
        later = _sums_behind(logs, slot)
        shares = jnp.exp(later) * steps
        refs.spread.shares[block * slots : (block + 1) * slots, :] = shares
        refs.kept[0, block : block + 1, :] = jnp.exp(later[:1] + logs[:1])
        scores = [_scores(refs, shape, block, i) for i in range(shape.new)]
        weights = jnp.concatenate([shares * score for score in scores])
        weights = jnp.pad(weights, [(0, LANES - slots * shape.new), (0, 0)])
        refs.spread.weights[block * LANES : (block + 1) * LANES, :] = jnp.transpose(weights)


def _sums_behind(logs: jax.Array, slot: jax.Array) -> jax.Array:
    """[R, lanes] the sum of `logs` over the slots behind each: sums alone, as their differences lose digits."""
    count = logs.shape[0]
    sums, distance = jnp.where(slot + 1 < count, pltpu.roll(logs, count - 1, 0), 0.0), 1
    while distance < count:
        sums = sums + jnp.where(slot + distance < count, pltpu.roll(sums, count - distance, 0), 0.0)
        distance *= 2
    return sums


def _scores(refs: _Refs, shape: Shape, block: int, i: int) -> jax.Array:
    """float32[R, 128] of the heads of a block of lanes: b of each slot times c of new token `i`."""
    slots, pieces = shape.slots, shape.state_dim // LANES
    first, end = block * LANES, min(shape.heads, (block + 1) * LANES)
    head = first + lax.broadcasted_iota(jnp.int32, (slots, LANES), 1)
    scores = jnp.zeros((slots, LANES), jnp.float32)
    for group in range(first // shape.per_group, -(-end // shape.per_group)):
        total = jnp.zeros((slots, 1), jnp.float32)
        for piece in range(pieces):
            b = refs.spread.bs[pl.ds((group * pieces + piece) * slots, slots), :]
            c = refs.c[0, group, :, piece * LANES : (piece + 1) * LANES]
            c = jnp.sum(jnp.where(_row_of(c.shape, shape) == i, c, 0.0), axis=0, keepdims=True)
            total = total + jnp.sum(b * c, axis=1, keepdims=True)
        scores = jnp.where(head >= group * shape.per_group, total, scores)
    return scores


def _base_sums(refs: _Refs, shape: Shape, dtype: jnp.dtype) -> None:
    """c of the new tokens times the base state."""
    seq, tile = pl.program_id(0), pl.program_id(1)
    buffer = (seq * shape.num_tiles + tile) & 1
    heads = min(shape.tile, shape.per_group)  # of a group in the tile
    most = max(1, _PRODUCT_ROWS // shape.head_dim)
    size = max(n for n in range(1, min(heads, most) + 1) if heads % n == 0 and (n * shape.head_dim) % LANES == 0)
    for first in range(0, shape.tile, size):
        group = lax.div(tile * shape.tile, shape.per_group) + first // heads
        states = refs.coming[buffer, first : first + size].reshape(size * shape.head_dim, shape.state_dim)
        seen = _product(refs.c[0, group].astype(dtype), states.astype(dtype), 1)
        lane = pl.multiple_of((tile * shape.tile + first) * shape.head_dim, LANES)
        where = (0, slice(None), pl.ds(lane, size * shape.head_dim))
        own = _row_of(seen.shape, shape)
        refs.base[where] = jnp.where((own >= 0) & (own < shape.new), seen, refs.base[where])


def _row_of(size: tuple[int, ...], shape: Shape) -> jax.Array:
    """int32[8 * M, ...] which of the sequence's new tokens each row of eight sequences is; others are out of range."""
    row = lax.broadcasted_iota(jnp.int32, size, 0)
    return row - lax.rem(pl.program_id(0), SUBLANES) * shape.new


def _ring_sums(refs: _Refs, shape: Shape) -> None:
    """Weights of the slots times their inputs, eight slots at a time; eight without a token are skipped."""
    held = refs.held[pl.program_id(0)]
    _add_slots(refs, shape, 0)
    for first in range(SUBLANES, shape.slots, SUBLANES):
        pl.when(held > first)(functools.partial(_add_slots, refs, shape, first))


def _add_slots(refs: _Refs, shape: Shape, first_slot: int) -> None:
    """Adds eight slots to the sums of a tile, some rows at a time; the first ones begin them."""
    seq = pl.program_id(0)
    held, heads = refs.held[seq], shape.per_row
    for first in range(0, shape.tile_rows, _ROWS):
        count = min(_ROWS, shape.tile_rows - first)
        row = _first_row(shape) + first
        rows = pl.ds(row, count)
        weights = [refs.spread.weights[pl.ds(row * heads + e, count, stride=heads), :] for e in range(heads)]
        if first_slot:
            sums = [refs.ring[0, i, rows, :] for i in range(shape.new)]
        else:
            sums = [jnp.zeros((count, LANES), jnp.float32)] * shape.new
        for j in range(first_slot, first_slot + SUBLANES):
            x = jnp.where(j < held, refs.rings.xs[seq & 1, j, rows, :].astype(jnp.float32), 0.0)
            for i in range(shape.new):
                lane = i * shape.slots + j
                sums[i] = sums[i] + x * _by_lanes([w[:, lane : lane + 1] for w in weights], shape.head_dim)
        for i in range(shape.new):
            refs.ring[0, i, rows, :] = sums[i]


def _first_row(shape: Shape) -> Any:
    """The first row of inputs of a tile. Where there is one it is known, so that any number of rows can be loaded."""
    return 0 if shape.num_tiles == 1 else pl.program_id(1) * shape.tile_rows


def _move_state(refs: _Refs, shape: Shape, dtype: jnp.dtype) -> None:
    """The state of the tile after the held tokens."""
    seq, tile = pl.program_id(0), pl.program_id(1)
    slots, heads, held = shape.slots, shape.per_row, refs.held[seq]
    buffer = (seq * shape.num_tiles + tile) & 1
    rows = pl.ds(_first_row(shape), shape.tile_rows)
    for j in range(slots):
        x = refs.rings.xs[seq & 1, j, rows, :].astype(jnp.float32)
        refs.spread.xs[pl.ds(j, shape.tile_rows, stride=slots), :] = jnp.where(j < held, x, 0.0)
    first = tile * shape.tile
    block = lax.div(first, LANES)
    to_first = lax.rem(LANES - lax.rem(first, LANES), LANES)
    shares = pltpu.roll(refs.spread.shares[pl.ds(block * slots, slots), :], to_first, 1)
    kept = jnp.broadcast_to(refs.kept[0, pl.ds(block, 1), :], (SUBLANES, LANES))
    kept = pltpu.roll(kept, to_first, 1)

    def one(row: jax.Array, shares: jax.Array, kept: jax.Array) -> None:
        x = refs.spread.xs[pl.ds(pl.multiple_of(row * slots, slots), slots), :]
        weighed = x * _by_lanes([shares[:, e : e + 1] for e in range(heads)], shape.head_dim)
        inflow = _inflow(weighed, _b_of(refs, shape, lax.div(first + row * heads, shape.per_group)), dtype)
        for e in range(heads):
            head = row * heads + e
            state = refs.coming[buffer, head].astype(jnp.float32) * kept[:1, e : e + 1]
            state = state + inflow[e * shape.head_dim : (e + 1) * shape.head_dim]
            refs.going[buffer, head] = state.astype(refs.going.dtype)

    together = largest_divisor(shape.tile_rows, _ROWS_TOGETHER)

    def some(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        for n in range(together):
            one(i * together + n, *carry)
            carry = (pltpu.roll(carry[0], LANES - heads, 1), pltpu.roll(carry[1], LANES - heads, 1))
        return carry

    lax.fori_loop(0, shape.tile_rows // together, some, (shares, kept))


def _b_of(refs: _Refs, shape: Shape, group: jax.Array) -> jax.Array:
    """float32[R, N] b of a group."""
    slots, pieces = shape.slots, shape.state_dim // LANES
    firsts = [pl.multiple_of((group * pieces + piece) * slots, slots) for piece in range(pieces)]
    return jnp.concatenate([refs.spread.bs[pl.ds(first, slots), :] for first in firsts], axis=1)


def _inflow(x: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32[128, N], the sum over slots of x [R, 128] times b [R, N], exact in both."""
    if dtype != jnp.bfloat16:
        return _product(x, b, 0)
    parts = split(x)
    return _product(jnp.concatenate(parts), jnp.concatenate([b.astype(dtype)] * len(parts)), 0)


def _by_lanes(columns: list[jax.Array], head_dim: int) -> jax.Array:
    """[n, 128] of [n, 1] of each head of a row of lanes."""
    shape = (columns[0].shape[0], LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = jnp.broadcast_to(columns[0], shape)
    for e, column in enumerate(columns[1:], start=1):
        spread = jnp.where(lane >= e * head_dim, column, spread)
    return spread


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Matrix product in float32 that sums over this axis of both."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((axis,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
