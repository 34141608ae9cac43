"""Sliding-window attention: token n sees the last `sliding_window` tokens, itself included; older blocks are released.

Source:  vLLM v1/kv_cache_interface.py (SlidingWindowSpec), v1/core/single_type_kv_cache_manager.py

With `num_sink_tokens` every token sees the first ones too (StreamingLLM, arXiv 2309.17453). Their blocks are kept until
the request ends, and every hit needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import AttentionSpec, WindowedSpec, cdiv


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(WindowedSpec, AttentionSpec):
    """K and V of the last `sliding_window` tokens."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"sliding_window", "num_sink_tokens"})
    supports_eagle: ClassVar[bool] = True

    num_sink_tokens: int = 0  # type: ignore[misc]  # of a spec, not of the kind

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_sink_tokens < 0:
            raise ValueError(f"expected num_sink_tokens >= 0, got {self.num_sink_tokens}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "sliding_window"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """`cdiv(min(window - 1 + in flight, max_model_len), block) + 1`: one more since a window may straddle.

        And the blocks of the first tokens, unless a whole request has fewer.
        """
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        in_window = cdiv(tokens, self.block_size) + 1
        whole = max(in_window, cdiv(max_model_len, self.block_size))
        return min(in_window + cdiv(self.num_sink_tokens, self.block_size), whole)
