"""Host arrays that a device can take as they are.

Flow:    shape, dtype -> [aligned_empty] -> array to fill and put on the device
Source:  JAX's CPU backend makes an array of a host array without a copy where its memory begins at a multiple of 64
         bytes (xla/pjrt/cpu); numpy's memory begins at any multiple of 16
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes


def aligned_empty(shape: Sequence[int], dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
    """An array of any content. Once it is on a device, nobody may write to it: the device may read this memory."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


__all__ = ["ALIGNMENT", "aligned_empty"]
