"""Chunked local attention: a token sees its own chunk of `attention_chunk_size` tokens, up to itself.

Source:  vLLM v1/kv_cache_interface.py (ChunkedLocalAttentionSpec), v1/core/single_type_kv_cache_manager.py

After n computed tokens the next token (number n) starts or continues the chunk at `n // chunk * chunk`:

    chunk 8     0 .. 7 | 8 .. 15 | 16 ..
    n = 13      skipped  seen: 8 .. 12
    n = 16      skipped  skipped   seen: none yet
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import AttentionSpec, cdiv
from kvjax.core.tables.ints_or_arrays import IntOrArray


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """K and V of the current chunk. A hit needs those of its last, unfinished chunk."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"attention_chunk_size"})
    forgets: ClassVar[bool] = True
    hit_size_varies: ClassVar[bool] = True

    attention_chunk_size: int  # a token sees only its own chunk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_chunk_size < 1:
            raise ValueError(f"expected attention_chunk_size >= 1, got {self.attention_chunk_size}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "chunked_local_attention"

    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """Tokens before the chunk of the next token."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """Computed tokens at which the first chunk begins that starts behind them."""
        return -(-num_tokens // self.attention_chunk_size) * self.attention_chunk_size

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """`cdiv(min(chunk + in flight, max_model_len), block)`; one more where a chunk may start inside a block."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + (self.attention_chunk_size % self.block_size > 0)
