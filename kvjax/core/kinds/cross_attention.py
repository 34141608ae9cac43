"""Cross attention: the decoder reads what an encoder made of a request's own input, which never changes.

Source:  vLLM v1/kv_cache_interface.py (CrossAttentionSpec), v1/core/single_type_kv_cache_manager.py

A request's blocks are those of its encoder tokens, all taken when it is admitted and held until it ends; decoding takes
none. They are never registered: another request has another input, or runs its encoder again.

What the *other* layers cache depends on the encoder's input too. So in a model with cross attention a request looks up
nothing unless something in the hash of its first block names that input: a multimodal item there, or a salt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import AttentionSpec, WholeSequenceSpec, cdiv


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(WholeSequenceSpec, AttentionSpec):
    """K and V of at most `max_num_encoder_tokens` encoder tokens."""

    is_prefix_cacheable: ClassVar[bool] = False
    reads_encoder: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True

    max_num_encoder_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_encoder_tokens < 1:
            raise ValueError(f"expected max_num_encoder_tokens >= 1, got {self.max_num_encoder_tokens}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "cross_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of the longest encoder input, however long the request is."""
        return cdiv(self.max_num_encoder_tokens, self.block_size)
