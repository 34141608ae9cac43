"""What sglang-jax frees between `free_group_begin` and `free_group_end`: it waits, and goes at once at the end.

Flow:    slots that are freed -> [FreeGroup.holds_back] -> kept until `end`, or freed now
Source:  free_group_begin and free_group_end of sgl-project/sglang-jax, srt/mem_cache/allocator.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt


@final
class FreeGroup:
    """The slots that one allocator's group holds back, by data-parallel rank."""

    def __init__(self, dp_size: int) -> None:
        self.is_open = False
        self._waiting: list[list[np.ndarray]] = [[] for _ in range(dp_size)]

    def holds_back(self, slots: npt.ArrayLike, dp_rank: int) -> bool:
        """Keeps the slots while the group is open; False: they are to be freed now."""
        if self.is_open:
            self._waiting[dp_rank].append(np.array(slots))
        return self.is_open

    def end(self, free: Callable[[np.ndarray, int], None]) -> None:
        """Closes the group and frees what waits, a call for each rank that has any."""
        self.is_open = False
        waiting, self._waiting = self._waiting, [[] for _ in self._waiting]
        for rank, slots in enumerate(waiting):
            if slots:
                free(np.concatenate(slots), rank)

    def clear(self, dp_rank: int | None) -> None:
        """Closes the group; what waits of a rank, or of all, is forgotten."""
        self.is_open = False
        for rank in range(len(self._waiting)) if dp_rank is None else (dp_rank,):
            self._waiting[rank] = []


__all__ = ["FreeGroup"]
