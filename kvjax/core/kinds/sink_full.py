"""Full attention with attention sinks: the KV of the first `sink_len` positions is the layer's own, not a request's.

Source:  vLLM v1/kv_cache_interface.py (SinkFullAttentionSpec), v1/core/single_type_kv_cache_manager.py

The model writes its learned sinks once into blocks that the manager reserves for good when it is made
(`reserved_block_ids`); every request's queries read them before its own blocks. They are never allocated, freed or
hashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import AttentionSpec, WholeSequenceSpec, cdiv


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(WholeSequenceSpec, AttentionSpec):
    """K and V of every token, behind `sink_len` positions that all requests share."""

    supports_context_parallelism: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True

    sink_len: int = 0  # type: ignore[misc]  # of a spec, not of the kind; 0 is refused

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_len < 1 or self.sink_len % self.block_size:
            raise ValueError(
                f"expected sink_len to be a positive multiple of the block size {self.block_size}, got {self.sink_len}"
            )

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "sink_full_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of a request of `max_model_len` tokens; the sinks are nobody's."""
        return cdiv(max_model_len, self.block_size)
