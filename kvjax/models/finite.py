"""Whether an array of weights is finite, by the bits of its exponents: one pass over its memory, in small pieces.

Flow:    load_model -> [num_not_finite] -> CheckpointError
"""

from __future__ import annotations

import numpy as np

_EXPONENTS = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F800000),
    "float8_e4m3fn": (np.uint8, 0x7F),  # has no infinity, and one NaN of each sign
    "float8_e5m2": (np.uint8, 0x7C),
}
_PIECE = 1 << 20  # numbers


def num_not_finite(array: np.ndarray) -> int:
    """How many numbers are NaN or infinite; 0 of dtypes that are no floats of 32, 16 or 8 bits."""
    if array.dtype.name not in _EXPONENTS:
        return 0
    unsigned, mask = _EXPONENTS[array.dtype.name]
    flat = np.ravel(array, order="K").view(unsigned)  # a view where the numbers lie in one piece, however transposed
    pieces = (flat[first : first + _PIECE] for first in range(0, flat.size, _PIECE))
    return sum(int(np.count_nonzero((piece & unsigned(mask)) == mask)) for piece in pieces)


__all__ = ["num_not_finite"]
