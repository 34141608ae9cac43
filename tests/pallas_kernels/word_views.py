"""A numpy model of how a TPU lays short numbers into 32-bit words, and of the views that compiled kernels take of them.

Of an array [..., rows, lanes] with `packing` numbers a word, rows `i * packing ... (i + 1) * packing` are word row `i`,
the first in the lowest bits. `ref.bitcast` to 32 bits shows those rows of words, `ref.reshape` joins leading
dimensions, and loads and stores may go by strides; `pltpu.bitcast` does with a value what `ref.bitcast` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import mosaic


def packing_of(dtype: Any) -> int:
    return 4 // np.dtype(dtype).itemsize


def to_words(x: np.ndarray) -> np.ndarray:
    """uint32[..., rows / packing, lanes] of [..., rows, lanes]."""
    pack, bits = packing_of(x.dtype), 8 * x.dtype.itemsize
    numbers = x.view(f"u{x.dtype.itemsize}").astype(np.uint32)
    return sum((numbers[..., p::pack, :] << np.uint32(bits * p) for p in range(pack)), np.uint32(0)).astype(np.uint32)


def from_words(words: np.ndarray, dtype: Any) -> np.ndarray:
    """[..., rows * packing, lanes] of uint32[..., rows, lanes]."""
    dtype = np.dtype(dtype)
    pack, bits = packing_of(dtype), 8 * dtype.itemsize
    parts = [(words >> np.uint32(bits * p)).astype(f"u{dtype.itemsize}") for p in range(pack)]
    joined = np.stack(parts, axis=-2).reshape(*words.shape[:-2], words.shape[-2] * pack, words.shape[-1])
    return joined.view(dtype)


class WordRef:
    """A reference: words, seen as numbers of a dtype."""

    def __init__(self, words: np.ndarray, dtype: Any) -> None:
        self.words, self.dtype = words, np.dtype(dtype)

    @classmethod
    def of(cls, x: np.ndarray) -> WordRef:
        return cls(to_words(x), x.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, rows, lanes = self.words.shape
        return (*leading, rows * packing_of(self.dtype), lanes)

    @property
    def values(self) -> np.ndarray:
        return from_words(self.words, self.dtype)

    def bitcast(self, dtype: Any) -> WordRef:
        return WordRef(self.words, dtype)

    def reshape(self, *shape: int) -> WordRef:
        assert shape[-1] in (self.words.shape[-1], mosaic.LANES)  # lanes stay, or rows are cut into pieces of 128
        *leading, rows, lanes = shape
        assert rows % packing_of(self.dtype) == 0  # no word is split
        view = self.words.reshape(*leading, rows // packing_of(self.dtype), lanes)
        assert np.shares_memory(view, self.words)
        return WordRef(view, self.dtype)

    @property
    def at(self) -> Any:
        """Views of leading dimensions."""
        return _At(self)

    def __getitem__(self, index: Any) -> jax.Array:
        assert packing_of(self.dtype) == 1
        return jnp.asarray(self.words[_index(index)].view(self.dtype))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert packing_of(self.dtype) == 1
        self.words[_index(index)] = np.asarray(value).view(np.uint32)


class _At:
    """`ref.at`."""

    def __init__(self, ref: WordRef) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> WordRef:
        index = _index(index)
        index = index if isinstance(index, tuple) else (index,)
        assert len(index) <= self.ref.words.ndim - 2
        return WordRef(self.ref.words[index], self.ref.dtype)


def _index(index: Any) -> Any:
    """Python's slices for those of Pallas."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    if hasattr(index, "size") and hasattr(index, "start"):
        stride = getattr(index, "stride", 1) or 1
        first = int(index.start)
        return slice(first, first + (int(index.size) - 1) * stride + 1, stride)
    return index if index is Ellipsis or isinstance(index, slice) else int(index)


def bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    """`pltpu.bitcast`: rows of words against rows of numbers."""
    x = np.asarray(x)
    return jnp.asarray(
        from_words(to_words(x), dtype) if x.dtype.itemsize != np.dtype(dtype).itemsize else x.view(dtype)
    )


def compile_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `mosaic` take the lines that are compiled on a chip."""
    monkeypatch.setattr(mosaic, "is_interpreted", lambda: False)
    monkeypatch.setattr(pltpu, "bitcast", bitcast)


def namespace(**names: Any) -> Any:
    return SimpleNamespace(**names)
