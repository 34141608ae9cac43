"""Reading the states of latent pages in a TPU kernel, in any entry format.

Flow:    rows of pages in VMEM -> [mosaic.load_row] -> words -> [EntryReader.vectors] -> vectors for matrix products

A row of a page holds as many states as elements fit a 32-bit word (`packing`), one in each *place* of the words. So a
state is `word >> (bits * place)` whatever its format, and a row is the least that a DMA moves.

fp8 entries keep the order of their bytes: number i of the rotary part, whose two bytes stand in lanes l and l + 1,
comes out in lane l, and lane l + 1 is zero. Queries are spread alike (`spread`), and results brought back (`gathered`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.latent_entries import EntryFormat, IndexFp8, LatentFp8, Plain
from pallas_kernels.layouts import cdiv
from pallas_kernels.tpu.mosaic import LANES, packing
from pallas_kernels.tpu.slab_refs import reason_of_slabs

_BIAS = 120 << 23  # from e4m3's exponent to that of float32
_SMALLEST_NORMAL = 2.0**-6
_MAGNITUDE = 0x7F << 20  # also e4m3's NaN


def reason_of_entries(entries: EntryFormat, pages: jax.Array, page_size: int) -> str | None:
    """What of latent pages the reader cannot do, in words; None if it can read them."""
    if pages.ndim != 5:
        return "TPU kernels read packed latent pages; make them by latent_layout(platform='tpu')"
    if entries == Plain() and pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"TPU kernels read plain entries in bfloat16 or float32, got {pages.dtype}"
    if page_size & (page_size - 1):
        return f"TPU kernels take page sizes that are powers of two, got {page_size}"
    return reason_of_slabs(pages)


@dataclass(frozen=True)
class EntryReader:
    """Vectors of `dim` numbers in a format, from pages of a dtype."""

    entries: EntryFormat
    dim: int
    dtype: str  # of the pages
    compute_dtype: str  # of the vectors: bfloat16 or float32

    @property
    def packing(self) -> int:
        """States of a row."""
        return packing(jnp.dtype(self.dtype))

    @property
    def num_pieces(self) -> int:
        """Pieces of 128 lanes of a state."""
        return cdiv(self.entries.width(self.dim), LANES)

    @property
    def lanes(self) -> int:
        """Lanes of a vector."""
        used = self.dim + (self.entries.rope_dim if isinstance(self.entries, LatentFp8) else 0)
        return cdiv(used, LANES) * LANES

    def spread(self, x: jax.Array) -> jax.Array:
        """[..., lanes] of [..., dim]: each number in the lane where `vectors` has it."""
        if isinstance(self.entries, LatentFp8):
            nope, rope = jnp.split(x, [self.dim - self.entries.rope_dim], axis=-1)
            rope = jnp.stack([rope, jnp.zeros_like(rope)], axis=-1).reshape(*x.shape[:-1], -1)
            x = jnp.concatenate([nope, rope], axis=-1)
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, self.lanes - x.shape[-1])])

    def gathered(self, x: jax.Array) -> jax.Array:
        """[..., dim] of [..., lanes], the inverse of `spread`."""
        if not isinstance(self.entries, LatentFp8):
            return x[..., : self.dim]
        nope_dim = self.dim - self.entries.rope_dim
        rope = x[..., nope_dim : nope_dim + 2 * self.entries.rope_dim : 2]
        return jnp.concatenate([x[..., :nope_dim], rope], axis=-1)

    def vectors(
        self,
        words: list[jax.Array],  # uint32[n, 128] a piece
        place: jax.Array | int,  # of the state in its row; int32[n, 128] or a number
        kept: jax.Array | None,  # bool[n, 128]: the others are zero; None: all
    ) -> list[jax.Array]:
        """[n, 128] in the compute dtype, a piece of 128 lanes each."""
        if isinstance(self.entries, LatentFp8):
            pieces = self._fp8_vectors(words, place, self.entries)
        else:
            pieces = [self._numbers(word, place, piece) for piece, word in enumerate(words[: self.lanes // LANES])]
        if kept is not None:
            pieces = [jnp.where(kept, x, 0.0) for x in pieces]
        return [x.astype(self.compute_dtype) for x in pieces]

    def index_scales(self, words: list[jax.Array]) -> list[jax.Array] | None:
        """float32[1, 128] factors of the states of 128 rows, by place, which `vectors` of IndexFp8 leaves out."""
        if not isinstance(self.entries, IndexFp8):
            return None
        across = [jnp.transpose(lax.bitcast_convert_type(word, jnp.int32)) for word in words[self.dim // LANES :]]
        lanes = [divmod(self.dim % LANES + i, LANES) for i in range(4)]
        byte_rows = [across[piece][row : row + 1] for piece, row in lanes]
        scales = []
        for place in range(self.packing):
            parts = [(x >> (8 * place) & 0xFF) << (8 * i) for i, x in enumerate(byte_rows)]
            scales.append(lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), jnp.float32))
        return scales

    def _numbers(self, word: jax.Array, place: jax.Array | int, piece: int) -> jax.Array:
        """A piece of a vector of plain numbers, or of e4m3 ones; float32."""
        if isinstance(self.entries, IndexFp8):
            x = _e4m3(_on_top(word, place, 8))
        elif self.packing == 2:  # bfloat16: the upper half of a float32
            x = _as_float(_on_top(word, place, 16) & jnp.uint32(0xFFFF0000))
        else:
            x = _as_float(word)
        if (piece + 1) * LANES <= self.dim:
            return x
        return jnp.where(_lane(x, piece) < self.dim, x, 0.0)

    def _fp8_vectors(self, words: list[jax.Array], place: jax.Array | int, entries: LatentFp8) -> list[jax.Array]:
        """Pieces of an entry `[e4m3 numbers | bfloat16 numbers | scales]`, float32."""
        rope_lane = self.dim - entries.rope_dim
        scale_lane = rope_lane + 2 * entries.rope_dim
        top = [_on_top(word, place, 8) for word in words]
        scales = _group_scales(top, scale_lane, entries.group, rope_lane // entries.group)
        pieces = []
        for piece, byte in enumerate(top[: self.lanes // LANES]):
            first, end = piece * LANES, (piece + 1) * LANES
            lane = _lane(byte, piece)
            x = jnp.zeros(byte.shape, jnp.float32)
            if first < rope_lane:
                x = _e4m3(byte) * scales[piece]
            if first < scale_lane and end > rope_lane:
                above = pltpu.roll(byte, LANES - 1, axis=1)  # of the next lane: the number's higher byte
                rope = _as_float((byte >> 8 & jnp.uint32(0x00FF0000)) | (above & jnp.uint32(0xFF000000)))
                x = jnp.where(lane < rope_lane, x, jnp.where((lane - rope_lane) & 1 == 0, rope, 0.0))
            if end > scale_lane:
                x = jnp.where(lane < scale_lane, x, 0.0)
            pieces.append(x)
        return pieces


def _on_top(word: jax.Array, place: jax.Array | int, bits: int) -> jax.Array:
    """The words with the element of `bits` bits at `place` as their highest bits."""
    shift = 32 - bits - bits * place
    return word << (shift if isinstance(shift, int) else shift.astype(jnp.uint32))


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _lane(x: jax.Array, piece: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1) + piece * LANES


def _e4m3(byte: jax.Array) -> jax.Array:
    """float32 of e4m3 numbers in the highest byte of each word.

    With the exponent's bias changed, a number below the smallest normal one, 2**-6, comes out as x where 2 * x - 2**-6
    is right; above, that is larger than x.
    """
    magnitude = byte >> 4 & jnp.uint32(_MAGNITUDE)
    x = _as_float(magnitude + jnp.uint32(_BIAS))
    x = jnp.minimum(x, (x + x) - _SMALLEST_NORMAL)
    x = jnp.where(magnitude == _MAGNITUDE, jnp.nan, x)
    return _as_float(lax.bitcast_convert_type(x, jnp.uint32) | (byte & jnp.uint32(0x80000000)))


def _group_scales(top: list[jax.Array], scale_lane: int, group: int, num_groups: int) -> list[jax.Array]:
    """float32[n, 128] powers of two, of the group that each lane belongs to, a piece each; 0 after the last group.

    A product with columns of one 1 each spreads them over the lanes, exactly.
    """
    lane, target = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    pieces = []
    for piece in range(cdiv(num_groups * group, LANES)):
        own = scale_lane + lax.div(target + piece * LANES, group)
        total: jax.Array | None = None
        for source in range(scale_lane // LANES, (scale_lane + num_groups - 1) // LANES + 1):
            exponent = jnp.maximum(top[source].astype(jnp.int32) >> 24 & 0xFF, 1) << 23
            at = _lane(exponent, source)
            is_scale = (at >= scale_lane) & (at < scale_lane + num_groups)
            scales = jnp.where(is_scale, lax.bitcast_convert_type(exponent, jnp.float32), 0.0)
            spread = jnp.where(own == lane + source * LANES, 1.0, 0.0).astype(jnp.bfloat16)
            part = lax.dot_general(
                scales.astype(jnp.bfloat16), spread, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            total = part if total is None else total + part
        assert total is not None
        pieces.append(total)
    return pieces
