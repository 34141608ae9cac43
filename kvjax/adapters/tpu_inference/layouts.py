"""How the pages of tpu-inference's kernels lie: shape, sharding, bytes, and K and V into them and out again.

Flow:    K [pages, page_size, heads, dim], V -> [a layout] -> the array that a kernel reads, and back
Source:  vllm-project/tpu-inference: `get_kv_cache_shape` of ragged_paged_attention/v3, its head dimension 64 variant,
         mla/v2 and batched_rpa; `packing` is 32 / bits of the dtype

    RPAv3Layout            [pages, page_size, ceil(2 H / packing), packing, ceil128(D)]   rows K0, V0, K1, V1, ...
    RPAv3Hd64Layout        [pages, page_size, ceil(H / packing), packing, 128]            lanes 0..63 K, 64..127 V
    SequenceOnLanesLayout  [pages, 2 H, ceil(D / packing) to whole words of 8, packing, page_size]
    MLAv2Layout            [pages, ceil(page_size / packing), packing, ceil128(Dl) + ceil128(Dr)]
    the same, transposed   [pages, ceil128(Dl) + ceil128(Dr), page_size]

`RPAv3Layout` of head dimensions up to 128 is kvjax's own layout on TPU: `kv_write` fills it. But one KV head of 8 bits
on a device is padded to whole words there, which kvjax's tokens share: such pages are kvjax's of two heads, the second
of zeros. Padding is zero.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.layouts import TPU_LANES, TPU_WORD_BITS, cdiv, dtype_bits

_SUBLANES = 8


@dataclass(frozen=True)
class StackLayout(abc.ABC):
    """Pages of one layer."""

    page_size: int  # tokens
    dtype: str

    @property
    def packing(self) -> int:
        """Numbers in a word of 32 bits."""
        return TPU_WORD_BITS // dtype_bits(self.dtype)

    @property
    @abc.abstractmethod
    def page_shape(self) -> tuple[int, ...]:
        """The shape of one page."""

    @abc.abstractmethod
    def partition_spec(self, data_axis: str | None, head_axis: str | None) -> PartitionSpec:
        """Pages over `data_axis`, KV heads over `head_axis`, where the layout has any."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return math.prod(self.page_shape) * dtype_bits(self.dtype) // 8

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """The shape of the array of `num_pages` pages."""
        return (num_pages, *self.page_shape)


@dataclass(frozen=True)
class KVLayout(StackLayout):
    """Pages that hold K and V of `num_kv_heads` heads, both of `head_dim` numbers."""

    num_kv_heads: int
    head_dim: int

    @abc.abstractmethod
    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """K and V [pages, page_size, num_kv_heads, head_dim] as the kernel's array."""

    @abc.abstractmethod
    def unpack(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""

    def _rows(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """[pages, page_size, 2 * num_kv_heads, head_dim]: K and V of a head one after the other."""
        return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], 2 * self.num_kv_heads, self.head_dim)

    def _heads(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`_rows` taken back."""
        return rows[:, :, 0::2], rows[:, :, 1::2]


@dataclass(frozen=True)
class RPAv3Layout(KVLayout):
    """Ragged paged attention v3, and batched RPA with heads on sublanes."""

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of one page."""
        words = cdiv(2 * self.num_kv_heads, self.packing)
        return (self.page_size, words, self.packing, _aligned(self.head_dim, TPU_LANES))

    def partition_spec(self, data_axis: str | None, head_axis: str | None) -> PartitionSpec:
        """Pages over `data_axis`, KV heads over `head_axis`."""
        return PartitionSpec(data_axis, None, head_axis, None, None)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """K and V [pages, page_size, num_kv_heads, head_dim] as the kernel's array."""
        _, _, words, packing, lanes = self.shape(k.shape[0])
        rows = _padded(self._rows(k, v), words * packing, lanes)
        return rows.reshape(self.shape(k.shape[0]))

    def unpack(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""
        rows = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
        return self._heads(rows[:, :, : 2 * self.num_kv_heads, : self.head_dim])


@dataclass(frozen=True)
class RPAv3Hd64Layout(KVLayout):
    """Ragged paged attention v3 for heads of 64 numbers: a row has K and V of a head."""

    head_dim: int = 64

    def __post_init__(self) -> None:
        if self.head_dim != TPU_LANES // 2:
            raise ValueError(f"expected head_dim {TPU_LANES // 2}, got {self.head_dim}; take RPAv3Layout")

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of one page."""
        return (self.page_size, cdiv(self.num_kv_heads, self.packing), self.packing, TPU_LANES)

    def partition_spec(self, data_axis: str | None, head_axis: str | None) -> PartitionSpec:
        """Pages over `data_axis`, KV heads over `head_axis`."""
        return PartitionSpec(data_axis, None, head_axis, None, None)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """K and V [pages, page_size, num_kv_heads, head_dim] as the kernel's array."""
        _, _, words, packing, lanes = self.shape(k.shape[0])
        rows = _padded(jnp.concatenate([k, v], axis=-1), words * packing, lanes)
        return rows.reshape(self.shape(k.shape[0]))

    def unpack(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""
        rows = pages.reshape(*pages.shape[:2], -1, TPU_LANES)[:, :, : self.num_kv_heads]
        return rows[..., : self.head_dim], rows[..., self.head_dim :]


@dataclass(frozen=True)
class SequenceOnLanesLayout(KVLayout):
    """Batched RPA with `KVLayout.SEQ_ALONG_LANE`: tokens of a page on the lanes, head dimensions above them."""

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of one page."""
        words = _aligned(self.head_dim, _SUBLANES * self.packing) // self.packing
        return (2 * self.num_kv_heads, words, self.packing, self.page_size)

    def partition_spec(self, data_axis: str | None, head_axis: str | None) -> PartitionSpec:
        """Pages over `data_axis`, KV heads over `head_axis`."""
        return PartitionSpec(data_axis, head_axis, None, None, None)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """K and V [pages, page_size, num_kv_heads, head_dim] as the kernel's array."""
        _, rows, words, packing, _ = self.shape(k.shape[0])
        return _padded(self._rows(k, v), rows, words * packing).transpose(0, 2, 3, 1).reshape(self.shape(k.shape[0]))

    def unpack(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""
        rows = pages.reshape(*pages.shape[:2], -1, self.page_size).transpose(0, 3, 1, 2)
        return self._heads(rows[..., : self.head_dim])


@dataclass(frozen=True)
class MLAv2Layout(StackLayout):
    """Latents of MLA v2: `lkv_dim` numbers, then `r_dim` rotary ones, each part padded to whole lanes."""

    lkv_dim: int
    r_dim: int
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.transposed and self.page_size % TPU_LANES:
            raise ValueError(f"expected a page size that {TPU_LANES} divides of transposed pages, got {self.page_size}")

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of one page."""
        dim = _aligned(self.lkv_dim, TPU_LANES) + _aligned(self.r_dim, TPU_LANES)
        if self.transposed:
            return (dim, self.page_size)
        return (cdiv(self.page_size, self.packing), self.packing, dim)

    def partition_spec(self, data_axis: str | None, head_axis: str | None) -> PartitionSpec:
        """Pages over `data_axis`; there are no heads."""
        del head_axis
        return PartitionSpec(data_axis)

    def pack(self, latent: jax.Array) -> jax.Array:  # [pages, page_size, lkv_dim + r_dim]
        """kvjax's latents as the kernel's array."""
        lkv = _padded(latent[..., : self.lkv_dim], self.page_size, _aligned(self.lkv_dim, TPU_LANES))
        rope = _padded(latent[..., self.lkv_dim :], self.page_size, _aligned(self.r_dim, TPU_LANES))
        rows = jnp.concatenate([lkv, rope], axis=-1)
        if self.transposed:
            return rows.swapaxes(1, 2)
        rows = _padded(rows, cdiv(self.page_size, self.packing) * self.packing, rows.shape[-1])
        return rows.reshape(self.shape(latent.shape[0]))

    def unpack(self, pages: jax.Array) -> jax.Array:
        """What `pack` was given."""
        rows = pages.swapaxes(1, 2) if self.transposed else pages.reshape(pages.shape[0], -1, pages.shape[-1])
        start = _aligned(self.lkv_dim, TPU_LANES)
        parts = [rows[..., : self.lkv_dim], rows[..., start : start + self.r_dim]]
        return jnp.concatenate(parts, axis=-1)[:, : self.page_size]


def _aligned(size: int, multiple: int) -> int:
    return cdiv(size, multiple) * multiple


def _padded(rows: jax.Array, num_rows: int, num_lanes: int) -> jax.Array:
    """Zeros behind the last two dimensions of `rows`."""
    pads = [(0, 0)] * (rows.ndim - 2) + [(0, num_rows - rows.shape[-2]), (0, num_lanes - rows.shape[-1])]
    return jnp.pad(rows, pads)
