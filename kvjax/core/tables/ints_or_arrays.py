"""Numbers of one row as an int, or of many rows as an int64 array: rules that serve both are written once.

Flow:    specs of kinds -> [IntOrArray, at_least, ...] -> one row (`allocate_slots`), many rows (`plan_step`)

`+`, `-`, `*`, `//` and comparisons mean the same for both. `max` does not, and numpy is slow for one int.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


def at_least(value: IntOrArray, least: int | IntOrArray) -> IntOrArray:
    """The larger of both, per row."""
    return max(value, least) if isinstance(value, int) else np.maximum(value, least)


def at_most(value: IntOrArray, most: int | IntOrArray) -> IntOrArray:
    """The smaller of both, per row."""
    return min(value, most) if isinstance(value, int) else np.minimum(value, most)


def choose(condition: bool | np.ndarray, if_true: IntOrArray, if_false: IntOrArray) -> IntOrArray:
    """One of both, per row."""
    if isinstance(if_true, int):
        return if_true if condition else if_false
    return np.where(condition, if_true, if_false)


__all__ = ["IntOrArray", "at_least", "at_most", "choose"]
