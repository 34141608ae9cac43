"""Arrays as the law of given arrays wants them: at addresses that XLA takes as they are, and overwritten at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GARBAGE = 77


def aligned(values: npt.ArrayLike, dtype: npt.DTypeLike = None) -> np.ndarray:
    """A copy that can be written, at an address that divides by 64."""
    array = np.asarray(values, dtype)
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def spoil(*values: Any) -> None:
    """Overwrites every numpy array in these that can be written, as a caller may who has them."""
    for array in arrays_of(values):
        if array.flags.writeable:
            array[...] = GARBAGE


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    """The numpy arrays in containers and dataclasses."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from arrays_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from arrays_of(one)
    elif is_dataclass(value):
        for one in fields(value):
            yield from arrays_of(getattr(value, one.name))
    elif hasattr(value, "block_ids"):
        yield from arrays_of(value.block_ids)
