"""Questions to arrays that mostly have a few elements: numpy's own answers cost a third of a microsecond to begin with.

Flow:    flags and counts of the blocks of one request -> [any_true, count_true, all_ones] -> BlockPool
"""

from __future__ import annotations

import numpy as np

ONE = np.int32(1).tobytes()
FEW = 64  # elements up to which Python's loop over bytes or ints is faster


def any_true(flags: np.ndarray) -> bool:  # bool[n]
    """Whether any of the flags is set."""
    return 1 in flags.tobytes()


def count_true(flags: np.ndarray) -> int:  # bool[n]
    """How many of the flags are set."""
    return flags.tobytes().count(1) if flags.size <= FEW else int(np.count_nonzero(flags))


def all_ones(values: np.ndarray) -> bool:  # int32[n]
    """Whether every value is 1."""
    return values.tobytes() == ONE * values.size
