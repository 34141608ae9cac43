"""Full attention with attention sinks: the KV of the first `sink_len` positions is the layer's own, not a request's.

Source:  vLLM v1/kv_cache_interface.py (SinkFullAttentionSpec), v1/core/single_type_kv_cache_manager.py

The model writes its learned sinks once into blocks that the manager reserves for good when it is made
(`sink_block_ids`); every request's queries read them before its own blocks. They are never dealt, freed or hashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core.kinds.full_attention import FullAttentionManager
from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.spec import AttentionSpec, cdiv


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(AttentionSpec):
    """K and V of every token, behind `sink_len` positions that all requests share."""

    sink_len: int

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

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are taken for good."""
        return self.sink_len // self.block_size

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of a request of `max_model_len` tokens; the sinks are nobody's."""
        return cdiv(max_model_len, self.block_size)


@register_kv_cache_manager(SinkFullAttentionSpec)
class SinkFullAttentionManager(FullAttentionManager):
    """Full attention in what the sinks leave of the pool."""

    kv_cache_spec: SinkFullAttentionSpec

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        sink_len = self.kv_cache_spec.sink_len
        if sink_len % self.block_size:
            raise ValueError(
                f"expected sink_len to be a multiple of the {self.block_size} tokens of a block over all ranks of "
                f"context parallelism, got {sink_len}"
            )
        num_sinks = sink_len // self.block_size
        if self.num_groups * num_sinks > self.block_pool.num_free_blocks:
            raise ValueError(
                f"expected a pool with {self.num_groups * num_sinks} free blocks for the sinks of groups "
                f"{self.group_ids}, got {self.block_pool.num_free_blocks}; give the pool more blocks"
            )
        self._sink_block_ids = self.block_pool.take_for_good(self.num_groups * num_sinks).reshape(-1, num_sinks)
        self._sink_block_ids.flags.writeable = False

    @property
    def sink_block_ids(self) -> np.ndarray:
        """int32[G, k] blocks of the sinks, per group: `sink_len` tokens in blocks that count all ranks' tokens."""
        return self._sink_block_ids

    @property
    def reserved_block_ids(self) -> np.ndarray:
        """int32[k] the blocks of the sinks."""
        return self._sink_block_ids.ravel()
