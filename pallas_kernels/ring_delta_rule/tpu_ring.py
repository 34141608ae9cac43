"""ring_delta_rule for TPU: one sequence a step, its base state and the held slots of its ring; entries go in place.

Flow:    `Prepared` tokens by sequence, pages -> [ring_rule] -> (outputs, states, ring in place)

Grid: one step per sequence. What it reads comes while the sequence before is computed (`tpu_moves`). A slot is a tile
of heads, one below the other. The weight of a held token is a sum over lanes of keys, and weighs rows of deltas: there
is no transpose. All slots are computed, since the compiler hides their latencies behind each other; those without a
token are zero. A base state is [K, V]: columns of keys and queries, out of one transpose for eight heads, times the
state, summed over sublanes, exact in float32; the heads of one key share columns. A state moves on by one product of
matrices a head, which sums `(D[j] k[j]) delta[j]^T` over the slots.

Bytes: the state and the held slots read, an entry written, and the state every R steps. Flops: `4 * K * V` a head and
token, `8 * (K + V)` a head, token and held token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta_rule.reference import inverse_length
from pallas_kernels.ring_delta_rule.arguments import Pages
from pallas_kernels.ring_delta_rule.tpu_moves import RINGS, STATES, Buffers, Field, Moves, Semaphores
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref, packing, recast

VMEM_BYTES = 64 << 20


class Prepared(NamedTuple):
    """New tokens of n sequences, `most` of each, float32; what is no token is zero.

    E is what decay leaves at a token of what was before all new ones. With a decay per channel it is in q, and beta E
    is in k. The lanes of `scalars`, at t and i of `most` new tokens:

        t * most + i              `beta[t] k[t] . D k[i]`, where D is what decay leaves of token i at t
        (most + t) * most + i     `q[t] . D k[i]`;   behind these, with a decay per head alone:
        t, then t                 beta[t] E[t], then E[t]
        one                       what decay leaves of the base state before the new tokens
        j                         and of held slot j
    """

    q: Any  # [n, most, H, K] normed and scaled
    k: Any  # [n, most, H, K] normed
    bv: Any  # [n, most, H, V] beta times v
    scalars: Any  # [n, H, lanes]
    new_keys: Any  # [n, most, G, K] as the ring has them
    new_decays: Any  # [n, most, H, K] as the ring has them; None: a decay per head


def ring_rule(
    tokens: Prepared,
    table: jax.Array,  # int32[fields * n] of `Field`
    num_seqs: jax.Array,  # int32[] those that do anything, the first ones
    pages: Pages,
    *,
    use_qk_l2norm: bool,
) -> tuple[jax.Array, Pages]:
    """(outputs float32[n, most, H, V] of these, pages); decays per head stay as they are."""
    rows, most, num_heads, key_dim = tokens.q.shape
    value_dim, num_slots, states = tokens.bv.shape[3], pages[1].shape[1], pages[0]
    is_per_channel = tokens.new_decays is not None

    def buffers(slots: int) -> Buffers:
        keys, deltas, decays = (
            pltpu.VMEM((RINGS, slots, *x.shape[2:]), x.dtype) for x in (pages[1], pages[2], pages[3])
        )
        return Buffers(keys, deltas, decays if is_per_channel else None)

    window = num_slots * (num_heads if is_per_channel else pages[1].shape[2])
    out = jax.ShapeDtypeStruct((rows, most, num_heads, value_dim), jnp.float32)
    results = call(
        functools.partial(_sequence, rows=rows, use_qk_l2norm=use_qk_l2norm),
        _Refs,
        name=f"ring_delta_n{most}",
        grid=num_seqs,
        scalars={"table": table},
        inputs={"tokens": Prepared(*map(_of_sequence, tokens))},
        outputs={"out": _of_sequence(out)},
        in_place={"pages": pages},
        scratch={
            "base": pltpu.VMEM((STATES, *states.shape[1:]), states.dtype),
            "held": buffers(num_slots),
            "new": buffers(most),
            "held_keys": pltpu.VMEM((window, key_dim), jnp.float32),
            "held_deltas": pltpu.VMEM((num_slots * num_heads, value_dim), jnp.float32),
            "parts": pltpu.VMEM((SUBLANES * most * _tile(num_heads), key_dim), jnp.float32),
            "repeated": pltpu.VMEM((2 * most, num_heads, max(key_dim, value_dim)), jnp.float32),
            "left": pltpu.VMEM((num_heads, key_dim), jnp.float32) if is_per_channel else None,
            "semaphores": Semaphores.scratch(),
        },
        vmem_limit_bytes=VMEM_BYTES,
    )
    return results["out"], results["pages"]


def _of_sequence(x: Any) -> Operand | None:
    """An array [n, ...] of which a step has the part of its sequence."""
    if x is None:
        return None
    return Operand(x, pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, *[0] * (len(x.shape) - 1))))


class _Refs(NamedTuple):
    """References of a sequence; float32 but for what lies as in pages."""

    table: Ref
    tokens: Prepared  # without their first axis
    out: Ref  # [most, H, V]
    pages: tuple[Ref, ...]  # HBM: states, keys, deltas, decays
    base: Ref  # [3, H, K, V]
    held: Buffers
    new: Buffers
    parts: Ref  # [8 * most * tile, K] keys and queries of a tile of heads, in parts; other rows are zero
    held_keys: Ref  # [R * G, K] normed; with a decay per channel [R * H, K] what it leaves of them
    held_deltas: Ref  # [R * H, V]; of a decay per head, what it leaves of them
    repeated: Ref  # [2 * most, H, max(K, V)] through which rows of key heads become rows of their value heads
    left: Ref | None  # [H, K] what decay leaves of the base state before the new tokens; None: a decay per head
    semaphores: Semaphores


def _sequence(refs: _Refs, *, rows: int, use_qk_l2norm: bool) -> None:
    """One sequence."""
    states, *ring = refs.pages
    moves = Moves(refs.table, rows, states, ring, refs.base, refs.held, refs.new, refs.semaphores)
    step, num_steps = pl.program_id(0), pl.num_programs(0)

    @pl.when(step == 0)
    def _() -> None:
        moves.load(step)
        refs.parts[...] = jnp.zeros_like(refs.parts)

    pl.when(step > 1)(lambda: moves.wait_for_state(step - 2))
    pl.when(step + 1 < num_steps)(lambda: moves.load(step + 1))
    moves.wait_for_load(step)
    pl.when(step > 1)(lambda: moves.wait_for_entries(step - 2))
    sequence = _Sequence(refs, lax.rem(step, STATES), step & 1, moves.field(Field.HELD, step), use_qk_l2norm)
    sequence.attend()
    moves.store_entries(step)

    @pl.when(moves.field(Field.STATE_PAGE, step) > 0)
    def _() -> None:
        sequence.move_on()
        moves.store_state(step)

    def end(before: int) -> None:
        moves.wait_for_state(step - before)
        moves.wait_for_entries(step - before)

    for before in (1, 0):
        pl.when((step + 1 == num_steps) & (step >= before))(functools.partial(end, before))


class _Sequence(NamedTuple):
    """What a step computes."""

    refs: _Refs
    state: jax.Array  # buffer of its state
    slot: jax.Array  # buffer of its ring and its entries
    num_held: jax.Array
    use_qk_l2norm: bool

    @property
    def most(self) -> int:
        """New tokens that there is room for."""
        return int(self.refs.tokens.q.shape[0])

    @property
    def num_heads(self) -> int:
        """Value heads."""
        return int(self.refs.tokens.q.shape[1])

    @property
    def key_heads(self) -> int:
        """Key heads."""
        return int(self.refs.held.keys.shape[2])

    @property
    def num_slots(self) -> int:
        """Slots of a ring."""
        return int(self.refs.held.keys.shape[1])

    @property
    def base_lane(self) -> int:
        """Lane of `Prepared.scalars` with what decay leaves of the base state; slots are behind it."""
        return 2 * self.most**2 + 2 * self.most

    def attend(self) -> None:
        """Outputs of the new tokens, and their entries."""
        refs, group = self.refs, self.num_heads // self.key_heads
        unit = SUBLANES * max(packing(x.dtype) for x in refs.held if x is not None)
        size = unit if self.key_heads % unit == 0 else self.key_heads
        _over(self.key_heads // size, lambda n: self._attend(n, size, group))
        refs.new.keys[self.slot] = refs.tokens.new_keys[...]
        if refs.new.decays is not None:
            refs.new.decays[self.slot] = refs.tokens.new_decays[...]

    def _attend(self, n: Any, size: int, group: int) -> None:
        """Of the n-th `size` key heads."""
        start, count = _start(n, size * group), size * group
        seen = self._held_seen(_start(n, size), size, start, count)
        tile = _tile(count)
        for first in range(0, count, tile):
            held = [x[first : first + tile] for x in seen]
            base = self._base_seen(_add(start, first), tile)
            deltas = self._finish(pl.ds(_add(start, first), tile), base, held)
            self._keep(deltas, pl.ds(_add(start, first), tile))

    def _keep(self, deltas: list[jax.Array], heads: pl.Slice) -> None:
        """Entries of some heads."""
        new = self.refs.new.deltas
        for t, delta in enumerate(deltas):
            new[self.slot, t, heads, :] = delta.astype(new.dtype)

    def _finish(self, heads: pl.Slice, base: list[jax.Array], held: list[jax.Array]) -> list[jax.Array]:
        """Deltas [tile, V] of the new tokens, whose outputs are stored."""
        tokens, most, scalars = self.refs.tokens, self.most, self.refs.tokens.scalars[heads, :]
        deltas: list[jax.Array] = []

        def scalar(lane: int) -> jax.Array:
            return _column(scalars, lane, self.refs.out.shape[2])

        def old(t: int, which: int) -> jax.Array:
            """What key times beta (0) or query (1) sees of the state before all new tokens."""
            own = which * most + t
            if self.refs.left is not None:
                return base[own] + held[own]
            return scalar(2 * most**2 + own) * (scalar(self.base_lane) * base[own] + held[own])

        for t in range(most):
            delta = tokens.bv[t, heads, :] - old(t, 0)
            for i, x in enumerate(deltas):
                delta = delta - scalar(t * most + i) * x
            deltas.append(delta)
            out = old(t, 1)
            for i, x in enumerate(deltas):
                out = out + scalar((most + t) * most + i) * x
            self.refs.out[t, heads, :] = out
        return deltas

    def _held_seen(self, key_start: Any, size: int, start: Any, count: int) -> list[jax.Array]:
        """[count, V] held deltas weighed by the keys of each new token, then by their queries; of some heads."""
        refs, is_per_channel = self.refs, self.refs.left is not None
        heads, keys = pl.ds(start, count), pl.ds(key_start, size)
        rows = [x[t, heads, :] for x in (refs.tokens.k, refs.tokens.q) for t in range(self.most)]
        if not is_per_channel:
            rows = self._of_key_heads(rows, count // size)
        scalars = refs.tokens.scalars[heads, :]
        gates = jnp.zeros((count, rows[0].shape[1]), jnp.float32)
        sums = [jnp.zeros((count, refs.out.shape[2]), jnp.float32)] * len(rows)
        for i in range(self.num_slots):
            is_held = i < self.num_held
            slot = jnp.where(is_held, self.num_held - 1 - i, i) if is_per_channel else i
            key = jnp.where(is_held, refs.held.keys[self.slot, slot, keys, :].astype(jnp.float32), 0.0)
            delta = jnp.where(is_held, refs.held.deltas[self.slot, slot, heads, :].astype(jnp.float32), 0.0)
            if self.use_qk_l2norm:
                key = key * inverse_length(key)[:, None]
            if is_per_channel:
                (key,) = self._of_value_heads([key], count // size, heads)
                key = key * jnp.exp(gates)
                gate = refs.held.decays[self.slot, slot, heads, :].astype(jnp.float32)
                gates = gates + jnp.where(is_held, gate, 0.0)
                self._hold(slot, (start, self.num_heads, key), (start, self.num_heads, delta))
            else:
                delta = delta * _column(scalars, self.base_lane + 1 + i, delta.shape[1])
                self._hold(slot, (key_start, self.key_heads, key), (start, self.num_heads, delta))
            weights = [jnp.sum(key * row, axis=1, keepdims=True) for row in rows]
            if not is_per_channel:
                shape = (size, delta.shape[1])
                weights = self._of_value_heads([jnp.broadcast_to(x, shape) for x in weights], count // size, heads)
            sums = [x + weight * delta for x, weight in zip(sums, weights, strict=True)]
        if refs.left is not None:
            refs.left[heads, :] = jnp.exp(gates)
        return sums

    def _hold(self, slot: Any, key: tuple[Any, int, jax.Array], delta: tuple[Any, int, jax.Array]) -> None:
        """Keeps a slot's keys and deltas, each (first row, rows of a slot, values), for a move of the state."""
        for window, (start, rows, x) in ((self.refs.held_keys, key), (self.refs.held_deltas, delta)):
            first = slot * rows + start
            if not isinstance(first, int) and x.shape[0] % SUBLANES == 0:
                first = pl.multiple_of(first, SUBLANES)
            window[pl.ds(first, x.shape[0]), :] = x

    def _of_key_heads(self, rows: list[jax.Array], group: int) -> list[jax.Array]:
        """Rows of key heads, of rows that are the same for all value heads of one."""
        return rows if group == 1 else [x.reshape(-1, group, x.shape[1])[:, 0] for x in rows]

    def _of_value_heads(self, rows: list[jax.Array], group: int, heads: pl.Slice) -> list[jax.Array]:
        """[count, lanes] rows of key heads, each once for every value head of it; by stores with a stride."""
        if group == 1:
            return rows
        found = []
        for n, x in enumerate(rows):
            for i in range(group):
                self.refs.repeated[n, pl.ds(_add(heads.start, i), x.shape[0], stride=group), : x.shape[1]] = x
            found.append(self.refs.repeated[n, heads, : x.shape[1]])
        return found

    def _base_seen(self, start: Any, count: int) -> list[jax.Array]:
        """[count, V] the base state seen by the keys of each new token, then by their queries; of some heads.

        A head has eight rows for each token: the three parts of its key and zero, between those of its query.
        """
        refs, most = self.refs, self.most
        tokens, left, heads = refs.tokens, refs.left, pl.ds(start, count)
        for t in range(most):
            for n, x in enumerate((tokens.k, tokens.q)):
                seeing = x[t, heads, :] if left is None else x[t, heads, :] * left[heads, :]
                for i, part in enumerate(_parts(seeing)):
                    first = SUBLANES * t + 2 * i + n
                    refs.parts[pl.ds(first, count, stride=SUBLANES * most), :] = part.astype(jnp.float32)
        seen = []
        for h in range(count):
            rows = refs.parts[SUBLANES * most * h : SUBLANES * most * (h + 1), :].astype(jnp.bfloat16)
            seen.append(_seen_by_parts(rows, refs.base[self.state, start + h]))
        found = [_sums_of_parts([x[SUBLANES * t : SUBLANES * (t + 1)] for x in seen]) for t in range(most)]
        return [x[n] for n in range(2) for x in found]

    def move_on(self) -> None:
        """The base state after the held tokens, in its buffer."""
        size = _tile(self.num_heads)
        _over(self.num_heads // size, lambda n: self._move_on(_start(n, size), size))

    def _move_on(self, start: Any, count: int) -> None:
        """Of some heads."""
        refs, num_slots = self.refs, self.num_slots
        rows = refs.held_keys.shape[0] // num_slots
        heads = pl.ds(start, count)
        columns = None if refs.left is None else _columns([refs.left[heads, :]])
        scalars = refs.tokens.scalars[heads, :]
        for i in range(count):
            h = start + i
            key = h if rows == self.num_heads else lax.div(h, self.num_heads // rows)
            keys = refs.held_keys[pl.ds(key, num_slots, stride=rows), :]
            deltas = refs.held_deltas[pl.ds(h, num_slots, stride=self.num_heads), :]
            if columns is None:
                kept = _column(scalars[i : i + 1], self.base_lane, deltas.shape[1])
            else:
                kept = _column(columns, i, deltas.shape[1])
            state = kept * refs.base[self.state, h].astype(jnp.float32) + _sum_of_products(keys, deltas)
            refs.base[self.state, h] = state.astype(refs.base.dtype)


def _over(count: int, some: Any) -> None:
    """`some(n)` for each n below `count`; a loop where there are several."""
    if count == 1:
        some(0)
        return

    def one(n: jax.Array, carry: None) -> None:
        some(n)
        return carry

    lax.fori_loop(0, count, one, None)


def _tile(count: int) -> int:
    """Rows that are taken at a time."""
    return SUBLANES if count % SUBLANES == 0 else count


def _start(n: Any, size: int) -> Any:
    """First of the n-th `size` rows."""
    return n * size if isinstance(n, int) else pl.multiple_of(n * size, size)


def _add(start: Any, offset: int) -> Any:
    """A row behind `start`; a multiple of eight remains one."""
    row = start + offset
    return row if isinstance(row, int) or offset % SUBLANES else pl.multiple_of(row, SUBLANES)


def _columns(rows: list[jax.Array]) -> jax.Array:
    """[K, lanes]: the rows of arrays [n, K], one beside the other; lanes a multiple of 128."""
    count = sum(x.shape[0] for x in rows)
    return jnp.transpose(jnp.pad(jnp.concatenate(rows), [(0, -count % LANES), (0, 0)]))


def _column(x: jax.Array, lane: int, count: int) -> jax.Array:
    """A lane of [rows, lanes] in `count` lanes."""
    return jnp.broadcast_to(x[:, lane : lane + 1], (x.shape[0], count))


def _seen_by_parts(rows: jax.Array, state: jax.Array) -> jax.Array:
    """float32[n, V] `rows @ state` of rows bfloat16[n, K], parts of one every other row.

    A state of float32 is three parts, too. Of the nine products of parts float32 holds six.
    """
    if state.dtype == jnp.bfloat16:
        return jnp.dot(rows, state, preferred_element_type=jnp.float32)
    part = lax.shift_right_logical(lax.broadcasted_iota(jnp.int32, rows.shape, 0), 1) & 3
    wide = rows.astype(jnp.float32)
    left = [rows, *(jnp.where(part < n, wide, 0.0).astype(rows.dtype) for n in (2, 1))]
    right = jnp.concatenate(_parts(state))
    return jnp.dot(jnp.concatenate(left, axis=1), right, preferred_element_type=jnp.float32)


def _sums_of_parts(seen: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """[n, V] whose row h is the sum of the even rows of the h-th [8, V]; and that of the odd ones.

    Of eight, two at a time: every other two rows of one are put between those of the other, and what is left of both is
    added to them, two rows further; then every other four rows. Then even rows of four heads are beside odd ones.
    """
    row = lax.broadcasted_iota(jnp.int32, seen[0].shape, 0)
    if len(seen) != SUBLANES:
        of_keys, of_queries = (jnp.where((row & 1) == n, 1.0, 0.0) for n in range(2))
        first, last = (jnp.concatenate([jnp.sum(x * y, 0, keepdims=True) for x in seen]) for y in (of_keys, of_queries))
        return first, last
    low, high = (_folded(_folded(seen[n], seen[n + 2], 2), _folded(seen[n + 4], seen[n + 6], 2), 4) for n in range(2))
    is_even = (row & 1) == 0
    return jnp.where(is_even, low, pltpu.roll(high, 1, 0)), jnp.where(is_even, pltpu.roll(low, 7, 0), high)


def _folded(x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """[8, V] rows of x without the bit `size`, each with the one `size` before it added, and those of y with it."""
    is_first = (lax.broadcasted_iota(jnp.int32, x.shape, 0) & size) == 0
    return jnp.where(is_first, x, y) + pltpu.roll(jnp.where(is_first, y, x), size, 0)


def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32[K, V] `x^T y` of float32[R, K] and [R, V].

    Each number is the sum of three of bfloat16. The six products of these that float32 holds lie side by side in one
    product of matrices, whose sums are of float32: R is small beside what the matrix unit sums at a time.
    """
    (x0, x1, x2), (y0, y1, y2) = _parts(x), _parts(y)
    left, right = jnp.concatenate([x0, x0, x1, x1, x0, x2]), jnp.concatenate([y0, y1, y0, y1, y2, y0])
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three arrays of bfloat16 whose sum is x: its bits, eight of the significand in each."""
    parts = []
    for _ in range(2):
        parts.append(recast(recast(x, jnp.dtype("uint32")) & jnp.uint32(0xFFFF0000), x.dtype))
        x = x - parts[-1]
    return [part.astype(jnp.bfloat16) for part in (*parts, x)]
