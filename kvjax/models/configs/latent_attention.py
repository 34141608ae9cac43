"""Sizes of a layer of multi-head latent attention. No jax.

Flow:    a family's config -> [LatentAttentionConfig] -> layers.latent_attention, kv_cache_specs
Source:  DeepSeek V2 (arXiv 2405.04434, section 2.1)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.models.configs.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Keys and values of all heads are projections of one latent a token; a part of the key is the same for all."""

    num_heads: int
    latent_dim: int
    nope_dim: int  # of a head's key that comes from the latent
    rope_dim: int  # of the key that all heads share
    value_dim: int  # of a head
    sm_scale: float
    query_rank: int | None = None  # of the queries' projection; None: it has full rank
    rope: RopeConfig | None = None  # of the shared key and its part of the queries; None: they are not rotated
    rope_interleaved: bool = True  # dimensions 2i and 2i + 1 turn together, else i and i + rope_dim / 2
    norm_eps: float = 1e-6  # of the norms of queries and latent
    bias: bool = False  # of the projections from and to hidden states

    @property
    def key_dim(self) -> int:
        """The dimension of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    def spec(self, block_size: int, dtype: str) -> MLAAttentionSpec:
        """The layer's cache."""
        return MLAAttentionSpec(block_size=block_size, head_size=self.latent_dim + self.rope_dim, dtype=dtype)
