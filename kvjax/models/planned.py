"""Models whose cache can be planned, though no decoder here runs them. No jax.

Flow:    config.json -> (hf_planned) -> [PlannedModel] -> kv_cache_specs -> planner
Source:  the cache of each layer as vLLM's model files declare it; sizes of DeepSeek V4: ARCHITECTURE.md
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.models.config import CHUNKED, DEFAULT_BLOCK_SIZE, FULL, SLIDING
from pallas_kernels.layouts import dtype_bits

FP8 = "float8_e4m3fn"


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


@dataclass(frozen=True, kw_only=True)
class CompressedModel(PlannedModel):
    """DeepSeek V4: a window in every layer, caches with an entry per `ratio` tokens, and what it takes to fill them.

    A compressor reads `coff * ratio` tokens for an entry: with ratio 4 (`coff` 2) those of the entry before as well.
    """

    default_block_size: ClassVar[int] = 256
    window_block_size: ClassVar[int] = 64
    state_block_sizes: ClassVar[dict[int, int]] = {4: 4, 128: 8}
    indexed_ratio: ClassVar[int] = 4

    head_dim: int
    rope_dim: int  # of head_dim; not quantised
    index_dim: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # per layer; 0: the layer has its window only

    @property
    def cache_words(self) -> str:
        """The latent of a layer, and at which ratios it is compressed."""
        layers = {ratio: self.compress_ratios.count(ratio) for ratio in sorted(set(self.compress_ratios) - {0})}
        return f"a latent of {self.head_dim}, " + ", ".join(f"{n} layers / {ratio}" for ratio, n in layers.items())

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Caches of layer i: `layers.{i}.compressed`, `.indexer`, `.window`, `.states` and `.indexer_states`.

        All of one sort stand together, those of small ratios first.

        Raises:
            ValueError: `block_size` is no multiple of all ratios.
        """
        block_size, dtype = block_size or self.default_block_size, dtype or self.dtype
        compressed = dict(sorted(((i, r) for i, r in enumerate(self.compress_ratios) if r), key=lambda pair: pair[1]))
        indexed = [i for i, ratio in compressed.items() if ratio == self.indexed_ratio]
        unit = lcm(*compressed.values())
        if block_size % unit:
            raise ValueError(
                f"expected block_size to be a multiple of {unit} (all compression ratios), got {block_size}"
            )
        entry, index_entry = self._entry(dtype), self._index_entry(dtype)
        window = SlidingWindowMLASpec(block_size=self.window_block_size, sliding_window=self.sliding_window, **entry)
        specs: dict[str, KVCacheSpec] = {}
        for i, ratio in compressed.items():
            specs[f"layers.{i}.compressed"] = MLAAttentionSpec(block_size=block_size, tokens_per_state=ratio, **entry)
        for i in indexed:
            specs[f"layers.{i}.indexer"] = MLAAttentionSpec(
                block_size=block_size, tokens_per_state=self.indexed_ratio, **index_entry
            )
        specs |= {f"layers.{i}.window": window for i in range(self.num_layers)}
        specs |= {f"layers.{i}.states": self._states(ratio, self.head_dim) for i, ratio in compressed.items()}
        return specs | {f"layers.{i}.indexer_states": self._states(self.indexed_ratio, self.index_dim) for i in indexed}

    def _entry(self, dtype: str) -> dict[str, Any]:
        """In fp8 a byte a number, rotary ones in bfloat16, and a scale byte for each 64 numbers (one is padding)."""
        if dtype_bits(dtype) > 8:
            return {"head_size": self.head_dim, "dtype": dtype}
        return {"head_size": self.head_dim - self.rope_dim + 2 * self.rope_dim + self.head_dim // 64, "dtype": "int8"}

    def _index_entry(self, dtype: str) -> dict[str, Any]:
        """In fp8 with one float32 scale."""
        if dtype_bits(dtype) > 8:
            return {"head_size": self.index_dim, "dtype": dtype}
        return {"head_size": self.index_dim + 4, "dtype": "int8"}

    def _states(self, ratio: int, dim: int) -> KVCacheSpec:
        """The compressor's inputs and scores."""
        coff = 2 if ratio == self.indexed_ratio else 1
        return SlidingWindowMLASpec(
            block_size=self.state_block_sizes[ratio],
            head_size=2 * coff * dim,
            dtype="float32",
            sliding_window=coff * ratio,
        )
