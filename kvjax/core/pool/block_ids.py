"""Block ids that callers of a pool give, checked, and how often each occurs.

Flow:    caller's integers -> [BlockIds] -> int64 ids, reference counts, repeats -> BlockPool
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockIds:
    """Checks ids against one pool. Owned by the pool, whose reference counts it reads."""

    def __init__(self, ref_count: np.ndarray) -> None:
        self._ref_count = ref_count  # int32[num_blocks]
        self._scratch = np.zeros(ref_count.size, np.int32)

    def checked(self, block_ids: npt.ArrayLike) -> np.ndarray:  # int64[n]
        """The ids.

        Raises:
            ValueError: they are not a row of integers in [0, num_blocks).
        """
        return self.with_counts(block_ids)[0]

    def with_counts(self, block_ids: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:  # int64[n], int32[n]
        """Checked ids and their reference counts; reading the counts checks the ids.

        A negative int32 reads as a huge uint32, so that numpy refuses it as it refuses an id past the end.
        """
        given = np.asarray(block_ids)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise ValueError(f"expected a row of integer block ids, got {given.dtype}{list(given.shape)}")
        num_blocks = self._ref_count.size
        if given.dtype == np.int32:
            ids = given.view(np.uint32).astype(np.int64)
        else:
            ids = given.astype(np.int64)
            ids[ids < 0] = num_blocks
        try:
            return ids, self._ref_count[ids]
        except IndexError:
            bad = given[(given < 0) | (given >= num_blocks)][0]
            raise ValueError(f"expected block ids in [0, {num_blocks}), got {bad}") from None

    def count_repeats(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """Distinct ids in the order of their last occurrence, and how often each occurs (1 if none repeats).

        Every occurrence writes its index and reads back the last one that was written: O(n), without a sort.
        """
        order = np.arange(len(ids), dtype=np.int32)
        self._scratch[ids] = order
        last = self._scratch[ids]
        is_last = last == order
        if np.count_nonzero(is_last) == len(ids):
            return ids, 1
        return ids[is_last], np.bincount(last, minlength=len(ids))[is_last]


def without_null(ids: np.ndarray) -> np.ndarray:
    """The ids without those of the null block, which is 0."""
    return ids if np.count_nonzero(ids) == len(ids) else ids[ids != 0]
