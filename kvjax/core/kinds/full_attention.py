"""Full attention: every token stays visible, so blocks are never released before the request ends.

Source:  vLLM v1/kv_cache_interface.py (FullAttentionSpec), v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import AttentionSpec, WholeSequenceSpec, cdiv


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(WholeSequenceSpec, AttentionSpec):
    """K and V of every token. `sliding_window` or `attention_chunk_size` is the mask of a promoted local kind."""

    layer_fields: ClassVar[frozenset[str]] = AttentionSpec.layer_fields | {"sliding_window", "attention_chunk_size"}
    supports_context_parallelism: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True

    sliding_window: int | None = None  # mask of a promoted window
    attention_chunk_size: int | None = None  # mask of promoted chunks

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "full_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.block_size)
