"""Sliding-window attention: token n sees the last `sliding_window` tokens, itself included; older blocks are released.

Source:  vLLM v1/kv_cache_interface.py (SlidingWindowSpec), v1/core/single_type_kv_cache_manager.py

With window W, after n computed tokens the next token (number n) sees n - W + 1 .. n:

    tokens   0 ............ n-W | n-W+1 ................ n-1 | n
             skipped: n - W + 1 | W - 1 tokens that a hit needs

With `num_sink_tokens` every token sees the first ones too (StreamingLLM, arXiv 2309.17453). Their blocks are kept until
the request ends, and every hit needs them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.local_attention import LocalAttentionManager
from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.kinds.single_type_manager import IntOrArray
from kvjax.core.spec import AttentionSpec, cdiv


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """K and V of the last `sliding_window` tokens."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"sliding_window", "num_sink_tokens"})

    sliding_window: int  # tokens that a query sees, its own included
    num_sink_tokens: int = 0  # type: ignore[misc]  # of a spec, not of the kind

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"expected sliding_window >= 1, got {self.sliding_window}")
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


class WindowManager(LocalAttentionManager):
    """Releases blocks as they leave the window; a hit needs only the blocks that the window sees."""

    @property
    @abc.abstractmethod
    def sliding_window(self) -> int:
        """Tokens that a token sees, itself included."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the window of the next token."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """Tokens before the window of the next token, for int64[n] rows."""
        return np.maximum(num_computed_tokens - (self.sliding_window - 1), 0)

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """Computed tokens at which the block `first_live` has left the window."""
        return (first_live + 1) * self.block_size + (self.sliding_window - 1)


@final
@register_kv_cache_manager(SlidingWindowSpec)
class SlidingWindowManager(WindowManager):
    """K and V per head."""

    supports_eagle: ClassVar[bool] = True

    kv_cache_spec: SlidingWindowSpec

    @property
    def sliding_window(self) -> int:
        """As the spec says."""
        return self.kv_cache_spec.sliding_window
