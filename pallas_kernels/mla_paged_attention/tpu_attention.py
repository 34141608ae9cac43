"""Attention of a step's units over their latent blocks on TPU: scores, mask, online softmax, weighted latents.

Flow:    queries and latent blocks in VMEM -> [StepAttention.attend] -> m, l, acc in VMEM -> [finish] -> out, lse

A unit begins with the state that the unit before it left, or with none where its item begins; so the units of a step
are independent but for a maximum and two sums, and their products, which take long one after the other, overlap. The
state after each unit stays in a place of its own: where an item ends, `finish` makes the result of it.

Logits are in base 2, the state is as `tpu.softmax` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_paged_attention.tpu_latents import LatentBlocks, MaskOf
from pallas_kernels.mla_paged_attention.tpu_plan import LatentConfig, Step, Walk
from pallas_kernels.mla_paged_attention.tpu_refs import Refs
from pallas_kernels.tpu.base2 import HIDDEN, NOTHING, base2_logits, dot, spread
from pallas_kernels.tpu.block_mask import kept_slots, seen_slots
from pallas_kernels.tpu.lse import heads_to_lanes
from pallas_kernels.tpu.mosaic import LANES, matrix_unit_lanes
from pallas_kernels.tpu.softmax import add_weights, inverse, largest, natural_lse, sink_m, sink_weight, sums, weights


class _Work(NamedTuple):
    """One product of queries with keys."""

    unit: int
    chunk: int
    part: int


@dataclass(frozen=True)
class StepAttention:
    """One step's attention."""

    config: LatentConfig
    walk: Walk
    blocks: LatentBlocks
    refs: Refs
    step: Step
    slot: jax.Array  # buffer of its blocks

    def attend(self, masked: bool) -> None:
        """All units; not `masked`: every row sees all of every block."""
        config = self.config
        work = [
            _Work(unit, chunk, part)
            for unit in range(config.units)
            for chunk in range(config.num_chunks)
            for part in range(config.block // config.part)
        ]
        ahead = min(config.ahead, len(work))
        scores = [self._scores(some) for some in work[:ahead]]
        for n, some in enumerate(work):
            if n + ahead < len(work):
                scores.append(self._scores(work[n + ahead]))
            self._update(some, scores[n], masked)

    def finish(self, unit: int) -> None:
        """Leaves the results of the item that ends with a unit in `out_tile` and `lse_tile`."""
        config, refs = self.config, self.refs
        for chunk in range(config.num_chunks):
            total = sums(refs.l[unit, chunk])
            factor = inverse(total)
            if config.has_k_scale:
                factor = factor * refs.k_scale[...]
            out = refs.acc[unit, chunk] * spread(factor, config.value_lanes)
            tokens = pl.ds(chunk * config.chunk, config.chunk)
            refs.out_tile[unit, tokens] = self._by_token(out).astype(refs.out_tile.dtype)
            if config.return_lse:
                lse = self._by_token(natural_lse(refs.m[unit, chunk], total))
                refs.lse_tile[unit, tokens] = heads_to_lanes(lse)

    def _by_token(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.config.chunk, self.config.heads, x.shape[1])

    def _scores(self, work: _Work) -> jax.Array:
        """float32[rows, part]; decoding on wide units a sum of products over 128 lanes each, see `tpu_softmax`."""
        config = self.config
        first = self.walk.place(self.step, self.step.units[work.unit]) + work.chunk * config.chunk
        q = self.refs.q_tile[self.step.slot, pl.ds(first, config.chunk)].reshape(config.rows, config.lanes)
        k = self.blocks.keys(self.slot, work.unit, work.part)
        depth = LANES if config.queries == 1 and matrix_unit_lanes() > LANES else config.lanes
        pieces = [slice(n, n + depth) for n in range(0, config.lanes, depth)]
        scores = [dot(q[:, piece], k[:, piece], (((1,), (1,)), ((), ()))) for piece in pieces]
        return sum(scores[1:], scores[0])

    def _update(self, work: _Work, s: jax.Array, masked: bool) -> None:
        """Merges a part's scores and values into m, l and acc."""
        config, refs = self.config, self.refs
        s = base2_logits(s, config.sm_scale, config.soft_cap, refs.k_scale[...] if config.has_k_scale else None)
        if masked:
            s = jnp.where(self._seen(work), s, HIDDEN)
        m, weight, acc = self._state_before(work)
        new = largest(s, m)
        p, shrink = weights(s, m, new)
        v = self.blocks.values(self.slot, work.unit, work.part, self._kept(work) if masked else None)
        at = (work.unit, work.chunk)
        refs.m[at] = new
        refs.l[at] = add_weights(weight, shrink, p)
        weighted = dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        refs.acc[at] = acc * spread(shrink, config.value_lanes) + weighted

    def _state_before(self, work: _Work) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(m, l, acc) of the rows before a part."""
        config, refs = self.config, self.refs
        at = (work.unit if work.part else (work.unit - 1) % config.units, work.chunk)
        m, weight, acc = refs.m[at], refs.l[at], refs.acc[at]
        if work.part:
            return m, weight, acc
        begins = self.step.units[work.unit].step == 0
        m_0, weight_0 = jnp.full_like(m, NOTHING), jnp.zeros_like(weight)
        if config.has_sinks:
            sinks = refs.sinks[...]
            m_0, weight_0 = sink_m(sinks), sink_weight(sinks)
        return jnp.where(begins, m_0, m), jnp.where(begins, weight_0, weight), jnp.where(begins, 0.0, acc)

    def _seen(self, work: _Work) -> jax.Array:
        """bool[rows, part]: whether a row sees a key."""
        config, unit = self.config, self.step.units[work.unit]
        token = None if config.queries == 1 else work.chunk * config.chunk + self._tokens()
        items = self.walk.items
        block = items.block(*unit)[0]
        first = work.part * config.part
        return seen_slots(items, unit.item, block, token, first=first, part=(config.rows, config.part))

    def _kept(self, work: _Work) -> MaskOf:
        """Whether anyone sees a key."""
        unit, items = self.step.units[work.unit], self.walk.items
        block = items.block(*unit)[0]
        return lambda slot: kept_slots(items, unit.item, block, slot)

    def _tokens(self) -> jax.Array:
        """int32[rows, 1]: which token of its chunk a row belongs to."""
        row = lax.broadcasted_iota(jnp.int32, (self.config.rows, 1), 0)
        heads = self.config.heads
        if heads & (heads - 1) == 0:
            return row >> (heads.bit_length() - 1)
        borders = [(row >= token * heads).astype(jnp.int32) for token in range(1, self.config.chunk)]
        return sum(borders, jnp.zeros_like(row))
