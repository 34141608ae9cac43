"""Sizes of a layer of multi-head latent attention. No jax.

Flow:    a family's config -> [LatentAttentionConfig] -> layers.latent_attention, kv_cache_specs
Source:  DeepSeek V2 (arXiv 2405.04434, section 2.1); its indexer DeepSeek V3.2 (arXiv 2512.02556, section 2.1)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.errors import ConfigError
from kvjax.models.configs.rope import RopeConfig
from pallas_kernels.layouts import dtype_bits


@dataclass(frozen=True, kw_only=True)
class TokenIndexerConfig:
    """What picks the tokens that a query attends to."""

    num_heads: int
    head_dim: int  # of its queries and of a token's key
    topk: int  # tokens that are picked
    rope_interleaved: bool  # dimensions 2i and 2i + 1 turn together, else i and i + rope_dim / 2
    norm_eps: float = 1e-6  # of the norm of keys
    has_own_queries: bool = False  # of normed hidden states, which grow with their position by learned numbers

    def spec(self, block_size: int, dtype: str) -> MLAAttentionSpec:
        """Cache of a layer's keys, beside its latents; for fp8 in bytes with a float32 scale each."""
        is_short = dtype_bits(dtype) <= 8
        return MLAAttentionSpec(
            block_size=block_size,
            head_size=self.head_dim + 4 * is_short,
            dtype="int8" if is_short else dtype,
        )


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
    indexer: TokenIndexerConfig | None = None  # None: all tokens are attended to
    scales_queries: bool = False  # they grow with their position, by numbers that each head has learned

    def __post_init__(self) -> None:
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise ConfigError(
                f"expected index_head_dim of at least the {self.rope_dim} numbers that are rotated "
                f"(qk_rope_head_dim), got {self.indexer.head_dim}"
            )

    @property
    def key_dim(self) -> int:
        """The dimension of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    def spec(self, block_size: int, dtype: str) -> MLAAttentionSpec:
        """The layer's cache."""
        return MLAAttentionSpec(block_size=block_size, head_size=self.latent_dim + self.rope_dim, dtype=dtype)
