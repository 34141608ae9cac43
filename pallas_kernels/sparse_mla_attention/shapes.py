"""Real model shapes of sparse latent attention, for tests, benchmarks and tuning.

Source: the config.json on each model's public page (`SparseShape.source`): num_attention_heads, head_dim,
qk_rope_head_dim, sliding_window, index_n_heads, index_head_dim, index_topk, compress_ratios.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparseShape:
    """Heads and dimensions of a model's attention, before tensor parallelism, which splits query heads alone."""

    name: str
    source: str  # repository on the Hugging Face hub whose config.json says so
    num_q_heads: int
    topk: int  # entries that the indexer picks, in layers of the smallest ratio
    dim: int = 512
    rope_dim: int = 64
    sliding_window: int = 128
    num_index_heads: int = 64
    index_dim: int = 128
    ratios: tuple[int, ...] = (4, 128)  # tokens of an entry, by layer kind; an indexer picks where it is 4

    @property
    def sm_scale(self) -> float:
        """Factor on the logits."""
        return self.dim**-0.5

    def per_shard(self, num_shards: int) -> int:
        """Query heads of one of `num_shards` tensor-parallel shards; every shard holds all entries.

        Raises:
            ValueError: the heads do not divide.
        """
        if num_shards < 1 or self.num_q_heads % num_shards:
            raise ValueError(
                f"{self.name}: expected shards that divide {self.num_q_heads} query heads, got {num_shards}"
            )
        return self.num_q_heads // num_shards


SHAPES = (
    SparseShape("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", 64, 512),
    SparseShape("deepseek-v4-pro", "deepseek-ai/DeepSeek-V4-Pro", 128, 1024),
)
