"""Checks that every op's validate.py shares: each names the argument, what was expected and what came.

All are static (shapes, dtypes, Python values), so they cost nothing in a jitted step, but `concrete`, which lets a
check look at values where they are known.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import KV_CACHE_DTYPES, TPU_LANES, lane_pieces, tokens_per_row
from pallas_kernels.slab_pages import is_in_slabs


def check_array(op: str, name: str, array: Any, shape: Sequence[int | None], axes: str) -> None:
    """Raises ValueError unless `array` has this shape; None stands for any size. `axes` describes it in words."""
    got = np.shape(array)
    if len(got) != len(shape) or any(want not in (None, size) for want, size in zip(shape, got, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: expected {name} {axes} of shape ({expected}), got {tuple(got)}")


def dtype_of(array: Any) -> jnp.dtype:
    """Of an array, a scalar, or an array of pages in slabs."""
    return jnp.dtype(array.dtype) if is_in_slabs(array) else jnp.result_type(array)


def check_int32(op: str, name: str, array: Any) -> None:
    """Raises ValueError unless `array` is int32."""
    dtype = jnp.result_type(array)
    if dtype != jnp.int32:
        raise ValueError(f"{op}: expected {name} of dtype int32, got {dtype}; convert with .astype('int32')")


def check_sequences(op: str, num_seqs: int, query_start_loc: Any, distribution: Any, **others: Any) -> None:
    """Raises ValueError unless the arrays that say where sequences start have their shapes; all are int32."""
    check_array(op, "query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    check_array(op, "distribution", distribution, (3,), "[3]")
    for name, array in {**others, "query_start_loc": query_start_loc, "distribution": distribution}.items():
        check_int32(op, name, array)


def check_starts(op: str, num_tokens: int, num_seqs: int, starts: np.ndarray, distribution: np.ndarray) -> np.ndarray:
    """New tokens of each real sequence, from known `query_start_loc` and `distribution`.

    Raises:
        ValueError: they contradict each other or the shapes.
    """
    ends = distribution.tolist()
    if not 0 <= ends[0] <= ends[1] <= ends[2] <= num_seqs:
        raise ValueError(f"{op}: expected distribution to rise within [0, {num_seqs}], got {ends}")
    starts = starts[: ends[2] + 1]
    q_lens = np.diff(starts)
    if starts[0] != 0 or (q_lens < 0).any() or starts[-1] > num_tokens:
        raise ValueError(f"{op}: expected query_start_loc to rise from 0 to at most {num_tokens}, got {starts}")
    if (q_lens[: ends[0]] > 1).any():
        raise ValueError(f"{op}: expected one query token per decode sequence, got {q_lens[: ends[0]]}")
    return q_lens


def check_floating(op: str, name: str, array: Any) -> None:
    """Raises ValueError unless `array` is float32, bfloat16 or float16."""
    dtype = dtype_of(array)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{op}: expected {name} of dtype float32, bfloat16 or float16, got {dtype}")


def check_scale(op: str, name: str, scale: Any, num_kv_heads: int | None = None) -> None:
    """Raises ValueError unless `scale` is None or floating of shape [] or, if heads are given, [num_kv_heads]."""
    if scale is None:
        return
    check_floating(op, name, scale)
    shapes = ((),) if num_kv_heads is None else ((), (num_kv_heads,))
    if np.shape(scale) not in shapes:
        raise ValueError(f"{op}: expected {name} of shape {' or '.join(map(str, shapes))}, got {np.shape(scale)}")


def check_slots(op: str, slots: np.ndarray, num_slots: int) -> None:
    """Raises ValueError for slots outside the pages, -1 apart, and for two new entries in one slot."""
    if slots.size and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"{op}: expected slots in [-1, {num_slots}), got {slots.min()} ... {slots.max()}")
    used = np.sort(slots[slots >= 0])
    twice = used[1:][used[1:] == used[:-1]]
    if twice.size:
        raise ValueError(f"{op}: expected one token per slot, got two for slot {twice[0]}")


def check_at_least(op: str, name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{op}: expected {name} to be an integer >= {least}, got {value!r}")


def check_pages(op: str, pages: Any) -> None:
    """Raises ValueError unless `pages` are arrays of one of the attention layouts (`pallas_kernels.layouts`)."""
    if not (isinstance(pages, tuple | list) or is_in_slabs(pages)) or len(pages) not in (1, 2):
        raise ValueError(f"{op}: expected pages to be a tuple (k, v) or (kv,), got {describe(pages)}")
    for array in pages:
        if dtype_of(array).name not in KV_CACHE_DTYPES:
            raise ValueError(f"{op}: expected pages of a dtype out of {KV_CACHE_DTYPES}, got {dtype_of(array)}")
    if len(pages) == 1:
        check_array(op, "pages[0]", pages[0], [*[None] * 4, TPU_LANES], "[pages, page_size, rows, packing, 128]")
        return
    check_array(op, "pages[0]", pages[0], [None] * 4, "[pages, page_size, num_kv_heads, head_dim]")
    shape = (*pages[0].shape[:3], None)
    check_array(op, "pages[1]", pages[1], shape, "[pages, page_size, num_kv_heads, head_dim_v] as pages[0]")
    if pages[0].dtype != pages[1].dtype:
        raise ValueError(f"{op}: expected K and V pages of one dtype, got {pages[0].dtype} and {pages[1].dtype}")


def resolve_kv_heads(op: str, pages: Sequence[jax.Array], head_dim: int, num_kv_heads: int | None) -> int:
    """Number of KV heads of `head_dim` numbers in `pages`, which `num_kv_heads` states where packing pads them.

    Raises:
        ValueError: the pages hold another number, or the packed rows leave it open and none is stated.
    """
    if num_kv_heads is not None:
        check_at_least(op, "num_kv_heads", num_kv_heads, 1)
    if len(pages) == 2:
        heads = pages[0].shape[2]
        if num_kv_heads not in (None, heads):
            raise ValueError(f"{op}: expected num_kv_heads {heads} as the pages have, got {num_kv_heads}")
        return heads
    (rows, packing), pieces = pages[0].shape[2:4], lane_pieces(head_dim)
    fitting = [heads for heads in range(1, rows * packing // 2 + 1) if -(-2 * heads // packing) * pieces == rows]
    if num_kv_heads is None and len(fitting) == 1:
        return fitting[0]
    if num_kv_heads not in fitting:
        raise ValueError(
            f"{op}: expected num_kv_heads out of {fitting} for {rows} rows of packing {packing} and head_dim "
            f"{head_dim}, got {num_kv_heads}; state it, since packing pads the heads"
        )
    return num_kv_heads


def page_tokens(pages: Sequence[Any], num_kv_heads: int) -> int:
    """Tokens of a page of one of the attention layouts, with `num_kv_heads` heads on this device."""
    rows = int(pages[0].shape[1])
    return rows if len(pages) == 2 else rows * tokens_per_row(num_kv_heads, pages[0].shape[3])


def concrete(*arrays: Any) -> list[np.ndarray] | None:
    """The arrays as numpy where all values are known (outside `jit`), else None."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return None
    return [np.asarray(array) for array in arrays]


def describe(pages: Any) -> str:
    """What `pages` are, for a message: how many arrays, or the type."""
    return f"{len(pages)} arrays" if isinstance(pages, tuple | list) else type(pages).__name__
