"""R-SWA: a token sees the whole prompt, and of the answer the last `rswa_window` tokens, its own included.

Source:  vLLM 0.33's v1/kv_cache_interface.py (RSWASpec) and v1/core/single_type_kv_cache_manager.py (RSWAManager)

    columns   0 .. prompt .. cdiv(P, block) - 1 | .. released .. | seen by the window
              kept to the end                   | null           | first_live ... num_blocks - 1

A request keeps the blocks of its P prompt tokens, and releases those of the answer that the window has left behind. The
first P + W tokens see all before them, W being the window; what later ones compute depends on where the prompt ended.
So only blocks of the first P + W tokens are registered, and no hit is longer (`GroupManagers.rswa_window`). A hit needs
every block before it. After a preemption the prompt is the same, and the answer is computed again with the same mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import NEVER, AttentionSpec, WholeSequenceSpec, cdiv
from kvjax.core.tables.ints_or_arrays import IntOrArray, at_least


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class RSWASpec(WholeSequenceSpec, AttentionSpec):
    """K and V of the prompt and of the answer's last `rswa_window` tokens."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"rswa_window"})
    supports_eagle: ClassVar[bool] = True

    rswa_window: int  # type: ignore[misc]  # of a spec, not of the kind

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rswa_window < 1:
            raise ValueError(f"expected rswa_window >= 1, got {self.rswa_window}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "rswa"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of `max_model_len` tokens: all of them may be the prompt."""
        return cdiv(max_model_len, self.block_size)


class PromptColumns:
    """Which columns of each row are its prompt's, and when those behind them are released. Owned by one manager."""

    def __init__(self, window: int, block_size: int, most_in_flight: int | None) -> None:
        """Without rows.

        Args:
            window: tokens.
            block_size: tokens of a column.
            most_in_flight: tokens that steps in flight add to a request; None: an admission counts all tokens.
        """
        self._window, self._block_size, self._most_in_flight = window, block_size, most_in_flight
        self.counts = np.zeros(0, np.int64)  # [rows] columns that a prompt token is in

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the array hold `num_rows` rows."""
        self.counts = np.pad(self.counts, (0, num_rows - self.counts.size))

    def begin(self, row: int, num_prompt_tokens: int) -> None:
        """A request with such a prompt has got the row."""
        self.counts[row] = cdiv(num_prompt_tokens, self._block_size)

    def most_slots(self, num_prompt_tokens: int) -> int:
        """Slots of the blocks that a request with such a prompt holds at most; a window may straddle one more."""
        return self._most_slots(cdiv(num_prompt_tokens, self._block_size))

    def most_slots_of(self, row: int) -> int:
        """`most_slots` of the request that has a row."""
        return self._most_slots(self.counts.item(row))

    def _most_slots(self, num_prompt_columns: int) -> int:
        if self._most_in_flight is None:
            return NEVER
        of_answer = cdiv(self._window - 1 + self._most_in_flight, self._block_size) + 1
        return (num_prompt_columns + of_answer) * self._block_size

    def skipped_tokens(self, settled_tokens: IntOrArray) -> IntOrArray:
        """Tokens before the window of the one behind int or int64[n] `settled_tokens`."""
        return at_least(settled_tokens - (self._window - 1), 0)

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """Settled tokens whose next one has a window behind `num_tokens`."""
        return num_tokens + (self._window - 1)


__all__ = ["PromptColumns", "RSWASpec"]
