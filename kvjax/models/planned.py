"""Models whose cache can be planned, though no decoder here runs them. No jax.

Flow:    config.json -> (hf_planned) -> [PlannedModel] -> kv_cache_specs -> planner
Source:  the cache of each layer as vLLM's model files declare it
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.models.config import CHUNKED, DEFAULT_BLOCK_SIZE, FULL, SLIDING


@dataclass(frozen=True, kw_only=True)
class PlannedModel(abc.ABC):
    """One model: its layers' caches, whatever computes them."""

    default_block_size: ClassVar[int] = DEFAULT_BLOCK_SIZE

    architecture: str
    num_layers: int
    max_model_len: int
    dtype: str  # of the cache, unless another is asked for

    @property
    @abc.abstractmethod
    def cache_words(self) -> str:
        """What a token's cache is made of, such as "8 KV heads of 128"."""

    @abc.abstractmethod
    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer that has one, by its name; None: the model's own block size and dtype."""

    @property
    def cache_dtype(self) -> str:
        """Of caches unless another is asked for."""
        return self.dtype

    @property
    def shared_layers(self) -> dict[str, str]:
        """Layers that read the pages of another layer, with that layer."""
        return {}


@dataclass(frozen=True, kw_only=True)
class AttentionModel(PlannedModel):
    """Layers of K and V per head: full, sliding or chunked; the last ones may read the pages of earlier ones."""

    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_shared_layers: int = 0  # at the end, without pages of their own

    @property
    def cache_words(self) -> str:
        """Heads of a layer."""
        return f"{self.num_kv_heads} KV heads of {self.head_dim}"

    @property
    def num_own_layers(self) -> int:
        """Layers with pages."""
        return self.num_layers - self.num_shared_layers

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of the layers with pages, `layers.{i}`."""
        common = _attention_fields(self, block_size, dtype)
        of_type: dict[str, KVCacheSpec] = {FULL: FullAttentionSpec(**common)} | self._local_specs(common)
        return {f"layers.{i}": of_type[kind] for i, kind in enumerate(self.layer_types[: self.num_own_layers])}

    def _local_specs(self, common: dict[str, Any]) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = {}
        if self.sliding_window is not None:
            specs[SLIDING] = SlidingWindowSpec(**common, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            specs[CHUNKED] = ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.attention_chunk_size)
        return specs

    @property
    def shared_layers(self) -> dict[str, str]:
        """Each of the last layers reads the pages of the last layer before them of its own type."""
        last = {kind: i for i, kind in enumerate(self.layer_types[: self.num_own_layers])}
        return {
            f"layers.{i}": f"layers.{last[self.layer_types[i]]}" for i in range(self.num_own_layers, self.num_layers)
        }


def _attention_fields(model: AttentionModel, block_size: int | None, dtype: str | None) -> dict[str, Any]:
    """Fields that every attention spec of the model has."""
    return {
        "block_size": block_size or model.default_block_size,
        "num_kv_heads": model.num_kv_heads,
        "head_size": model.head_dim,
        "dtype": dtype or model.dtype,
    }
