"""The best of a token's entries, from their scores in VMEM: threshold, then the entries above it, then their order.

Flow:    keys int32[rows, 128] -> [Selection.write] -> int32[1, K] entries, highest score first

A *key* orders as its score does; entries that the token does not see have the least. Steps, all exact:

    threshold   the largest t with at least K keys >= t, bit by bit from the top; where ties at t are more than wanted,
                likewise the largest entry e so that fewer than K keys are above t, or t and of an entry below e
    picks       by 128 rows: number k of all selected entries, in the order of the rows, by products with triangles of
                ones (numbers before it) and with one-hot rows (its row, then its lane); bytes go through bfloat16
    order       how many picks are before each: greater key, or equal and a smaller entry
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.latent_blocks import log2
from pallas_kernels.tpu.mosaic import LANES, Ref

LEAST = -(2**31)  # key of an entry that is not seen
GROUP = 128  # rows that are worked on at a time
_BEYOND = 1 << 30  # more than any entry: of places that stay empty


def sort_keys(scores: jax.Array) -> jax.Array:
    """int32 that order as finite float32 scores do, zeros of both signs alike."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@dataclass(frozen=True)
class Selection:
    """The selection of one token."""

    keys: Ref  # VMEM int32[rows, 128], rows a multiple of GROUP
    num_groups: jax.Array  # groups of rows that are filled
    num_seen: jax.Array  # entries that the token sees
    topk: int
    places: int  # entries of a row of states: which entry a key is of, see `_entry`
    picked_keys: Ref  # VMEM int32[K, 128], the same in every lane, K a multiple of 128
    picked_entries: Ref  # likewise

    def write(self, out: Callable[[int, jax.Array], None]) -> None:
        """`out(n, int32[1, 128])` of places 128 * n on: the entries in order, -1 after the last."""
        threshold, last_tie = self._threshold()
        self.picked_keys[...] = jnp.full_like(self.picked_keys, LEAST)
        place = lax.broadcasted_iota(jnp.int32, self.picked_entries.shape, 0)
        self.picked_entries[...] = _BEYOND + place
        self._pick(threshold, last_tie)
        self._order(out)

    def _entry(self, group: jax.Array | int, row: jax.Array, lane: jax.Array) -> jax.Array:
        """The entry whose key stands at `lane` of a row of a group: rows go block by block, place by place."""
        row = row + group * GROUP
        block, place = row >> log2(self.places), row & (self.places - 1)
        return (block * LANES + lane) * self.places + place

    def _group(self, group: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(keys, entries) int32[GROUP, 128]"""
        shape = (GROUP, LANES)
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        keys = self.keys[pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP), :]
        return keys, self._entry(group, row, lane)

    def _count(self, selected: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """How many keys are `selected`, float32[]."""

        def one(group: jax.Array, total: jax.Array) -> jax.Array:
            found = jnp.where(selected(*self._group(group)), 1.0, 0.0)
            return total + jnp.sum(found.reshape(-1, 8, LANES), axis=0)

        return jnp.sum(lax.fori_loop(0, self.num_groups, one, jnp.zeros((8, LANES), jnp.float32)))

    def _threshold(self) -> tuple[jax.Array, jax.Array]:
        """(least key that is selected, last entry of those that have just that key)."""
        wanted = jnp.float32(self.topk)
        num_seen = self.num_seen.astype(jnp.float32)

        def raise_threshold(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            bit, threshold, found = carry  # threshold: as unsigned
            higher = threshold | (1 << bit)
            count = self._count(lambda keys, _: keys >= (higher ^ LEAST))
            enough = count >= wanted
            return bit - 1, jnp.where(enough, higher, threshold), jnp.where(enough, count, found)

        start = (jnp.int32(31), jnp.int32(0), num_seen)
        _, threshold, found = lax.while_loop(lambda c: (c[0] >= 0) & (c[2] > wanted), raise_threshold, start)
        threshold = jnp.maximum(threshold ^ LEAST, LEAST + 1)
        has_ties = found > wanted

        def raise_entry(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            bit, entry = carry
            higher = entry | (1 << bit)
            count = self._count(lambda keys, own: (keys > threshold) | ((keys == threshold) & (own < higher)))
            return bit - 1, jnp.where(count < wanted, higher, entry)

        most_bits = (self.keys.shape[0] * LANES).bit_length()
        first = (jnp.where(has_ties, most_bits - 1, -1), jnp.int32(0))
        _, entry = lax.while_loop(lambda c: c[0] >= 0, raise_entry, first)
        return threshold, jnp.where(has_ties, entry, _BEYOND)

    def _pick(self, threshold: jax.Array, last_tie: jax.Array) -> None:
        """Fills `picked_keys` and `picked_entries`, in the order of the rows."""
        row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        up_to, before = _ones(row <= lane), _ones(lane < row)

        def one(group: jax.Array, base: jax.Array) -> jax.Array:
            keys, entries = self._group(group)
            selected = _ones((keys > threshold) | ((keys == threshold) & (entries <= last_tie)))
            in_row = _dot(selected, up_to)  # selected in the row, up to the lane
            of_row = jnp.broadcast_to(in_row[:, LANES - 1 :], in_row.shape)
            first = _dot(before, of_row.astype(jnp.bfloat16)) + base  # number of the row's first
            numbers = (first + in_row).astype(jnp.int32)
            end = base + jnp.sum(of_row[:, :1])
            rows = _Rows(group, jnp.transpose(first), jnp.transpose(first + of_row), numbers, keys, base, end)
            for n in range(self.picked_keys.shape[0] // LANES):
                overlaps = (base < (n + 1) * LANES) & (end > n * LANES)
                pl.when(overlaps)(functools.partial(self._pick_places, n, rows))
            return end

        lax.fori_loop(0, self.num_groups, one, jnp.float32(0))

    def _pick_places(self, n: int, rows: _Rows) -> None:
        """Fills places 128 * n ... with those of a group's selected entries that belong there."""
        row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        number = row + n * LANES
        exact = number.astype(jnp.float32)
        hot = _ones((exact >= rows.first) & (exact < rows.end))  # of each place: its row
        # Numbers are known but for multiples of 256, and differ by no more than 128 in a row.
        upto = _dot(hot, _byte(rows.numbers, 0)).astype(jnp.int32)
        found = jnp.sum(jnp.where(((number - upto) & 255) < 128, 1.0, 0.0), axis=1, keepdims=True)  # its lane
        own = lane == found.astype(jnp.int32)
        halves = [
            jnp.sum(jnp.where(own, _dot(hot, _byte(rows.keys, high)) * 256 + _dot(hot, _byte(rows.keys, low)), 0.0),
                    axis=1, keepdims=True).astype(jnp.int32)
            for high, low in ((3, 2), (1, 0))
        ]  # fmt: skip
        key = jnp.broadcast_to(halves[0] << 16 | halves[1], own.shape)
        its_row = _dot(hot, row.astype(jnp.float32).astype(jnp.bfloat16)).astype(jnp.int32)
        entry = self._entry(rows.group, its_row, jnp.broadcast_to(found.astype(jnp.int32), own.shape))
        here = (exact >= rows.base) & (exact < rows.stop)
        at = pl.ds(n * LANES, LANES)
        self.picked_keys[at, :] = jnp.where(here, key, self.picked_keys[at, :])
        self.picked_entries[at, :] = jnp.where(here, entry, self.picked_entries[at, :])

    def _order(self, out: Callable[[int, jax.Array], None]) -> None:
        """Puts every pick in the place that as many picks are before."""
        num_blocks = self.picked_keys.shape[0] // LANES
        lane = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
        blocks = [pl.ds(n * LANES, LANES) for n in range(num_blocks)]
        across = [tuple(jnp.transpose(x[at, :])[:1] for x in (self.picked_keys, self.picked_entries)) for at in blocks]

        def one(n: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = pl.ds(pl.multiple_of(n * LANES, LANES), LANES)
            key, entry = self.picked_keys[at, :], self.picked_entries[at, :]
            before = [(k > key) | ((k == key) & (e < entry)) for k, e in across]
            count = sum(jnp.where(x, 1.0, 0.0) for x in before)
            place = jnp.sum(count, axis=1, keepdims=True).astype(jnp.int32)
            value = jnp.where(entry < _BEYOND, entry, -1)
            found = [jnp.where(place == lane + i * LANES, value, 0) for i in range(num_blocks)]
            return tuple(t + jnp.sum(x.reshape(-1, 8, LANES), axis=0) for t, x in zip(totals, found, strict=True))

        zeros = tuple(jnp.zeros((8, LANES), jnp.int32) for _ in blocks)
        for n, total in enumerate(lax.fori_loop(0, num_blocks, one, zeros)):
            out(n, jnp.sum(total, axis=0, keepdims=True))


@dataclass(frozen=True)
class _Rows:
    """The selected entries of a group of 128 rows, numbered over all rows."""

    group: Any
    first: jax.Array  # float32[128, 128] of each row, along the lanes: number of its first selected entry
    end: jax.Array  # likewise: one after its last
    numbers: jax.Array  # int32[rows, 128] selected up to the lane
    keys: jax.Array  # int32[rows, 128]
    base: jax.Array  # float32[] selected before the group
    stop: jax.Array  # float32[] and up to its end


def _ones(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, 1.0, 0.0).astype(jnp.bfloat16)


def _byte(x: jax.Array, n: int) -> jax.Array:
    """Byte `n` of int32s, exact in bfloat16."""
    return (x >> (8 * n) & 255).astype(jnp.float32).astype(jnp.bfloat16)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
