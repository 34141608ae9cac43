"""Sliding-window attention: token n sees the last `sliding_window` tokens, itself included; older blocks go back.

Source:  vLLM v1/kv_cache_interface.py (SlidingWindowSpec), v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.spec import AttentionSpec, cdiv


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """K and V of the last `sliding_window` tokens."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"expected sliding_window >= 1, got {self.sliding_window}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "sliding_window"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """`cdiv(min(window - 1 + in flight, max_model_len), block) + 1`: one more since a window may straddle."""
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1
