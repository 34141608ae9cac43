"""How one page of KV cache lies in memory: array shapes, bytes, addressing, sharding axes.

Flow:    spec (heads, dims, dtype name, page size, platform) -> [layouts] -> kernels, planner, device layer
Source:  TPU: the packed pages of ragged paged attention v3 (vllm-project/tpu-inference); GPU and CPU: K and V apart.

Pure Python: no jax, no numpy, so that the host core and the planner may import it. Dtypes are names
("bfloat16", "float8_e4m3fn"). A *slot* is one token's place: `slot = page * page_size + offset`; every layout
but those marked + address a token as `array[slot // page_size, slot % page_size]`.

    split    K: [pages, page_size, num_kv_heads, head_dim]       V: [pages, page_size, num_kv_heads, head_dim_v]
    packed   [pages, page_size, words * pieces, packing, 128], packing = 32 / bits: a token is `words` = ceil(2 *
             num_kv_heads / packing) words of K0, V0, K1, V1, ..., each word as wide as a head, cut in `pieces` =
             ceil(head_dim / 128) of 128 lanes; piece p of word w is row w * pieces + p; padding is zero
    packed+  where a device has one KV head of 8 bits: [pages, page_size / 2, num_kv_heads * pieces, 4, 128]; the word
             [i, h] of a page holds K of token 2i, V of 2i, K of 2i + 1, V of 2i + 1 of head h
    latent   [pages, page_size, head_dim]; on TPU+ [pages, ceil(page_size / packing), pieces, packing, 128], where state
             s of a page is at [s // packing, :, s % packing]
    recurrent  [pages, *shape] for each array of a state, one state a page; on TPU what lies behind the heads of marked
             arrays is padded with zeros to whole lanes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TPU_LANES = 128
TPU_SUBLANES = 8
TPU_WORD_BITS = 32
ROW_BYTES = TPU_LANES * TPU_WORD_BITS // 8

_DTYPE_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
}

KV_CACHE_DTYPES = tuple(_DTYPE_BITS)
_STATE_DTYPE_BITS = {"int16": 16, "int32": 32}  # of recurrent states alone

# Logical axis names; the caller maps them to mesh axes (or to None) when it makes PartitionSpecs.
PAGE_AXIS = "page"
TOKEN_AXIS = "page_token"
HEAD_AXIS = "kv_head"
PACK_AXIS = "pack"
DIM_AXIS = "head_dim"
LANE_AXIS = "lane"


def dtype_bits(dtype: str) -> int:
    """Bits of one element of the dtype called `dtype`.

    Raises:
        ValueError: the name is none of the KV-cache dtypes.
    """
    known = _DTYPE_BITS | _STATE_DTYPE_BITS
    bits = known.get(dtype)
    if bits is None:
        raise ValueError(f"expected a KV-cache dtype out of {sorted(known)}, got {dtype!r}")
    return bits


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for non-negative `a` and positive `b`."""
    return -(-a // b)


def lane_pieces(head_dim: int) -> int:
    """Rows of 128 lanes that hold `head_dim` numbers on TPU."""
    return cdiv(head_dim, TPU_LANES)


def slab_rows(rows: int, *, on_tpu: bool) -> int:
    """Rows of 128 words of a slab whose pages take so many: on TPU whole tiles, so that none ends within one."""
    return cdiv(rows, TPU_SUBLANES) * TPU_SUBLANES if on_tpu else rows


def slot_rows(count: int, dtype: str) -> tuple[int, int]:
    """[rows, 128], the shape of `count` numbers in whole rows of 128 words, of which 16-bit numbers share each."""
    packing = 32 // dtype_bits(dtype)
    return cdiv(count, packing * TPU_LANES) * packing, TPU_LANES


def tokens_per_row(num_kv_heads: int, packing: int) -> int:
    """Tokens of one device's packed pages that share a row of words of `packing` numbers each."""
    return max(1, packing // (2 * num_kv_heads))


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a page column, without its leading page axis."""

    name: str
    page_shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]  # logical axis name of each dimension of `page_shape`

    @property
    def page_bytes(self) -> int:
        """Bytes that one page of this array takes on the device, padding included."""
        return math.prod(self.page_shape) * dtype_bits(self.dtype) // 8

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of the whole array over `num_pages` pages."""
        return (num_pages, *self.page_shape)


@dataclass(frozen=True)
class PageLayout:
    """One column: the arrays that hold one layer's pages. Equal layouts may share a pool."""

    kind: str  # "split", "packed", "latent" or "recurrent"
    page_size: int
    arrays: tuple[ArrayLayout, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes that one page of the column takes on the device, padding included."""
        return sum(array.page_bytes for array in self.arrays)

    @property
    def rows(self) -> int:
        """Rows of 128 words of one page in slabs: each of its arrays begins with one."""
        return sum(cdiv(array.page_bytes, ROW_BYTES) for array in self.arrays)

    @property
    def platform(self) -> str:
        """One whose pages lie so: "tpu" where numbers lie in whole lanes, else "cpu"."""
        return "tpu" if any(LANE_AXIS in array.axes for array in self.arrays) else "cpu"

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a page that share a row of words; 1 where pages are not packed."""
        return self.page_size // self.arrays[0].page_shape[0] if self.kind == "packed" else 1


def attention_layout(
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    platform: str = "cpu",
    head_dim_v: int | None = None,
    num_shards: int = 1,
) -> PageLayout:
    """Layout of a K and V cache on `platform` ("cpu", "gpu" or "tpu").

    `num_shards`: devices that the KV heads split over; the layout is that of all of them together.

    Raises:
        ValueError: a size is not positive, or the dtype or platform is unknown.
        NotImplementedError: on TPU, K and V dimensions differ, whose rows hold both, or an odd page would end within a
            row of two tokens.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "page_size": page_size,
        "num_shards": num_shards,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")
    bits = dtype_bits(dtype)
    if platform in ("cpu", "gpu", "cuda", "rocm"):
        axes = (TOKEN_AXIS, HEAD_AXIS, DIM_AXIS)
        k = ArrayLayout("k", (page_size, num_kv_heads, head_dim), dtype, axes)
        v = ArrayLayout("v", (page_size, num_kv_heads, head_dim_v), dtype, axes)
        return PageLayout("split", page_size, (k, v))
    if platform == "tpu":
        if head_dim_v != head_dim:
            raise NotImplementedError(f"TPU pages need equal K and V dimensions, got {head_dim} and {head_dim_v}")
        packing = TPU_WORD_BITS // bits
        words = cdiv(2 * num_kv_heads, packing)
        own_heads = num_kv_heads // num_shards if num_kv_heads % num_shards == 0 else num_kv_heads
        tokens = tokens_per_row(own_heads, packing)
        if tokens > 1:
            words = num_kv_heads // own_heads
        if page_size % tokens:
            raise NotImplementedError(
                f"TPU pages of one KV head of {dtype} hold {tokens} tokens a row of words: expected a page_size that "
                f"is a multiple of {tokens}, got {page_size}"
            )
        shape = (page_size // tokens, words * lane_pieces(head_dim), packing, TPU_LANES)
        axes4 = (TOKEN_AXIS, HEAD_AXIS, PACK_AXIS, LANE_AXIS)
        return PageLayout("packed", page_size, (ArrayLayout("kv", shape, dtype, axes4),))
    raise ValueError(f"expected platform 'cpu', 'gpu' or 'tpu', got {platform!r}")


def latent_layout(*, head_dim: int, page_size: int, dtype: str, platform: str = "cpu") -> PageLayout:
    """Layout of a cache of one vector per state (MLA) on `platform`; `page_size` counts states.

    Raises:
        ValueError: a size is not positive, or the dtype or platform is unknown.
    """
    for name, value in {"head_dim": head_dim, "page_size": page_size}.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")
    bits = dtype_bits(dtype)
    if platform in ("cpu", "gpu", "cuda", "rocm"):
        array = ArrayLayout("latent", (page_size, head_dim), dtype, (TOKEN_AXIS, DIM_AXIS))
    elif platform == "tpu":
        packing = TPU_WORD_BITS // bits
        shape = (cdiv(page_size, packing), lane_pieces(head_dim), packing, TPU_LANES)
        array = ArrayLayout("latent", shape, dtype, (TOKEN_AXIS, DIM_AXIS, PACK_AXIS, LANE_AXIS))
    else:
        raise ValueError(f"expected platform 'cpu', 'gpu' or 'tpu', got {platform!r}")
    return PageLayout("latent", page_size, (array,))


def recurrent_layout(
    *,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    head_axes: tuple[int, ...] | None = None,
    lane_arrays: tuple[int, ...] = (),
    platform: str = "cpu",
) -> PageLayout:
    """Layout of states of recurrent layers, one a page: an array per shape, the same on every platform.

    Heads, or whatever tensor parallelism splits, are the dimension `head_axes` of each shape; None: the first. On TPU
    all dimensions behind the heads of `lane_arrays` are padded to multiples of 128, as kernels there take them.

    Raises:
        ValueError: not a dtype and an axis for each of one or more shapes, a size is not positive, no array or
            nothing behind its heads is where `lane_arrays` say, or the platform is unknown.
    """
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"expected platform 'cpu', 'gpu' or 'tpu', got {platform!r}")
    if not shapes or len(shapes) != len(dtypes):
        raise ValueError(f"expected a dtype for each of one or more shapes, got {shapes} and {dtypes}")
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"expected sizes >= 1 in shapes, got {shapes}")
    axes = (0,) * len(shapes) if head_axes is None else head_axes
    if len(axes) != len(shapes) or not all(0 <= axis < len(shape) for axis, shape in zip(axes, shapes, strict=True)):
        raise ValueError(f"expected an axis of heads in each of {shapes}, got {head_axes}")
    if not all(0 <= i < len(shapes) and axes[i] < len(shapes[i]) - 1 for i in lane_arrays):
        raise ValueError(f"expected lane_arrays among {shapes} with dimensions behind {axes}, got {lane_arrays}")
    for dtype in dtypes:
        dtype_bits(dtype)
    arrays = [
        ArrayLayout(f"state_{i}", shape, dtype, _state_axes(len(shape), axis))
        for i, (shape, dtype, axis) in enumerate(zip(shapes, dtypes, axes, strict=True))
    ]
    for i in lane_arrays if platform == "tpu" else ():
        arrays[i] = _in_lanes(arrays[i], axes[i])
    return PageLayout("recurrent", 1, tuple(arrays))


def _state_axes(rank: int, head_axis: int) -> tuple[str, ...]:
    return tuple(HEAD_AXIS if axis == head_axis else f"state_dim_{axis}" for axis in range(rank))


def _in_lanes(array: ArrayLayout, head_axis: int) -> ArrayLayout:
    """The array with whole lanes in each dimension behind the heads."""
    own, behind = array.page_shape[: head_axis + 1], array.page_shape[head_axis + 1 :]
    shape = (*own, *(lane_pieces(size) * TPU_LANES for size in behind))
    return replace(array, page_shape=shape, axes=(*array.axes[:-1], LANE_AXIS))
