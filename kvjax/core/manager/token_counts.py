"""Counts of tokens that callers give, as ints.

Flow:    arguments of KVCacheManager's calls -> [as_count] -> ints, or ValueError
"""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

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


__all__ = ["MOST_TOKENS", "as_count"]
