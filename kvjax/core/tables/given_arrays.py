"""Arrays that pass between callers and the state here: copied on the way in, read-only on the way out.

Flow:    caller's array -> [own_copy] -> state; state -> [read_only] -> caller
"""

from __future__ import annotations

from typing import Any

import numpy as np


def own_copy(array: Any) -> Any:
    """A copy of a numpy array that can be written; a read-only one, and anything else, as it is."""
    return array.copy() if isinstance(array, np.ndarray) and array.flags.writeable else array


def read_only(array: np.ndarray) -> np.ndarray:
    """A view through which nothing is written."""
    view = array.view()
    view.flags.writeable = False
    return view


__all__ = ["own_copy", "read_only"]
