"""Counts of tokens that callers give, as ints.

Flow:    arguments of KVCacheManager's calls -> [as_count, as_counts] -> ints, arrays of one a row, or ValueError
"""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

MOST_TOKENS = 1 << 60  # sums of a few such counts stay within int64


def as_count(name: str, value: SupportsIndex, least: int = 0) -> int:
    """The value as an int.

    Raises:
        ValueError: it is no integer, or not in [least, MOST_TOKENS].
    """
    try:
        count = index(value)
    except TypeError:
        raise ValueError(f"expected {name} as an integer, got {value!r}") from None
    if count < least:
        raise ValueError(f"expected {name} >= {least}, got {count}")
    if count > MOST_TOKENS:
        raise ValueError(f"expected {name} <= {MOST_TOKENS}, got {count}")
    return count


def as_counts(name: str, values: npt.ArrayLike, rows: np.ndarray, least: int) -> np.ndarray | int:
    """The values as an int, or as one int64 per row of int64[n] `rows`.

    Raises:
        ValueError: they are no integers, not as many as rows, or not in [least, MOST_TOKENS].
    """
    if type(values) is int and least <= values <= MOST_TOKENS:
        return values
    if isinstance(values, int):
        return as_count(name, values, least)
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"expected {name} as integers, got {given.dtype}")
    if not given.ndim:
        return as_count(name, given.item(), least)
    if given.shape != rows.shape:
        raise ValueError(f"expected {name} for {rows.size} rows or one number, got shape {list(given.shape)}")
    counts = given.astype(np.int64, copy=False)
    above_least = (counts - least).view(np.uint64)  # what is below, or too large for int64, is huge
    if np.maximum.reduce(above_least, initial=0) > MOST_TOKENS:
        as_count(name, given[above_least.argmax()].item(), least)
    return counts


__all__ = ["MOST_TOKENS", "as_count", "as_counts"]
