"""Chunked local attention: a token sees its own chunk of `attention_chunk_size` tokens, up to itself.

Source:  vLLM v1/kv_cache_interface.py (ChunkedLocalAttentionSpec), v1/core/single_type_kv_cache_manager.py

After n computed tokens the next token (number n) starts or continues the chunk at `n // chunk * chunk`:

    chunk 8     0 .. 7 | 8 .. 15 | 16 ..
    n = 13      skipped  seen: 8 .. 12
    n = 16      skipped  skipped   seen: none yet
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.local_attention import LocalAttentionManager
from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.kinds.single_type_manager import IntOrArray
from kvjax.core.spec import AttentionSpec, cdiv


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """K and V of the current chunk."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"attention_chunk_size"})

    attention_chunk_size: int  # a token sees only its own chunk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_chunk_size < 1:
            raise ValueError(f"expected attention_chunk_size >= 1, got {self.attention_chunk_size}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "chunked_local_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """`cdiv(min(chunk + in flight, max_model_len), block)`; one more where a chunk may start inside a block."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + (self.attention_chunk_size % self.block_size > 0)


@final
@register_kv_cache_manager(ChunkedLocalAttentionSpec)
class ChunkedLocalAttentionManager(LocalAttentionManager):
    """Releases the blocks of a chunk when the next begins; a hit needs those of its last, unfinished chunk."""

    supports_eagle: ClassVar[bool] = False
    hit_size_varies: ClassVar[bool] = True

    kv_cache_spec: ChunkedLocalAttentionSpec

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the chunk of the next token."""
        chunk = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk * chunk

    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """Tokens before the chunk of the next token, for int64[n] rows."""
        chunk = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk * chunk

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """Computed tokens at which the first chunk begins that starts after the block `first_live`."""
        chunk = self.kv_cache_spec.attention_chunk_size
        return -(-(first_live + 1) * self.block_size // chunk) * chunk
