"""Positions of multimodal prompts on three axes (time, height, width), by row of the request table.

Flow:    a prompt's positions, made by the model's processor -> [MRopePositions] -> build_step_plan -> StepPlan
Source:  M-RoPE: Qwen2-VL (Wang et al., 2024), section 2.1; generated tokens go on as in vLLM's mrope_position_delta

The tokens of an image take the places of its grid, so a prompt's positions are given once, when its request is
admitted. A generated token is text: it has the same place on all axes, one behind the largest position before it. Rows
without positions of their own hold text from the first token on.
"""

from __future__ import annotations

import numpy as np

NUM_AXES = 3


class MRopePositions:
    """Positions of the running requests that have images or video. Owned by one thread; grows with the rows.

    A step costs one gather, and a copy for each request whose prompt it computes.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, np.ndarray] = {}  # by row, int32[3, num_prompt_tokens]
        self._num_prompt_tokens = np.zeros(16, np.int64)  # by row, 0: text alone
        self._offsets = np.zeros(16, np.int64)  # by row, what generated tokens are moved by

    def set(self, row: int, prompt_positions: np.ndarray) -> None:  # int[3, num_prompt_tokens] >= 0
        """Gives the request that owns `row` the positions of its prompt; they are copied.

        Raises:
            ValueError: not three rows of integers >= 0, one for each token of a prompt. Nothing is changed.
        """
        positions = np.asarray(prompt_positions)
        if positions.ndim != 2 or positions.shape[0] != NUM_AXES or not positions.size:
            raise ValueError(f"expected prompt positions [3, num_prompt_tokens], got shape {list(positions.shape)}")
        if positions.dtype.kind not in "iu" or positions.min() < 0:
            raise ValueError(f"expected integer prompt positions >= 0, got {positions.dtype} from {positions.min()}")
        self._reserve(row + 1)
        self._prompts[row] = positions.astype(np.int32)
        self._num_prompt_tokens[row] = positions.shape[1]
        self._offsets[row] = int(positions.max()) + 1 - positions.shape[1]

    def clear(self, row: int) -> None:
        """Makes the row one of text; call it when a request that has positions gives its row up."""
        if self._prompts.pop(row, None) is not None:
            self._num_prompt_tokens[row] = self._offsets[row] = 0

    def of_tokens(
        self,
        rows: np.ndarray,  # int64[S]
        computed: np.ndarray,  # int64[S]
        starts: np.ndarray,  # int64[S + 1] first new token of each request
        token_rows: np.ndarray,  # int64[T]
        positions: np.ndarray,  # int64[T] places in the sequences
    ) -> np.ndarray:  # int32[3, T]
        """Positions of a step's new tokens, in a fresh array."""
        self._reserve(int(rows.max(initial=-1)) + 1)
        out = np.empty((NUM_AXES, positions.size), np.int32)
        out[:] = positions + self._offsets[token_rows]
        for i in np.flatnonzero(computed < self._num_prompt_tokens[rows]).tolist():
            part = self._prompts[rows.item(i)][:, computed[i] : computed[i] + starts[i + 1] - starts[i]]
            out[:, starts[i] : starts[i] + part.shape[1]] = part
        return out

    def _reserve(self, num_rows: int) -> None:
        while num_rows > self._offsets.size:
            self._offsets = np.concatenate([self._offsets, np.zeros_like(self._offsets)])
            self._num_prompt_tokens = np.concatenate([self._num_prompt_tokens, np.zeros_like(self._num_prompt_tokens)])


__all__ = ["MRopePositions"]
