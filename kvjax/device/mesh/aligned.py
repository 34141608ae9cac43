"""Host arrays that a device can take as they are.

Flow:    shape, dtype -> [aligned_empty] -> array to fill and put on the device
Source:  JAX's CPU backend makes an array of a host array without a copy where its memory begins at a multiple of 64
         bytes (xla/pjrt/cpu); numpy's memory begins at any multiple of 16
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
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


class RecycledMemory:
    """Aligned arrays whose memory serves again once neither host nor device refers to it; any thread may ask.

    Memory that is new costs a page fault for each 4 KiB that is written, as much as a copy of those bytes.
    """

    def __init__(self, most_idle_bytes: int) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: defaultdict[int, deque[memoryview]] = defaultdict(deque)  # by bytes
        self._idle_bytes = 0  # about: threads add and subtract without a lock

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
        """As `aligned_empty`."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not num_bytes:
            return np.empty(shape, dtype)
        try:
            memory = self._idle[num_bytes].pop()
            self._idle_bytes -= num_bytes
        except IndexError:
            memory = aligned_empty((num_bytes,)).data
        # Views of an array on a memoryview refer to that array, whatever they are views of: it lives as long as they.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._recycle, memory).atexit = False
        return array.view(dtype).reshape(shape)

    def _recycle(self, memory: memoryview) -> None:
        if self._idle_bytes + memory.nbytes <= self._most_idle_bytes:
            self._idle_bytes += memory.nbytes
            self._idle[memory.nbytes].append(memory)


__all__ = ["ALIGNMENT", "RecycledMemory", "aligned_empty"]
