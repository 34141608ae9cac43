"""Real model shapes of latent attention, for tests, benchmarks and tuning.

Source: the config.json on each model's public page (`LatentShape.source`): num_attention_heads, kv_lora_rank,
qk_rope_head_dim, qk_nope_head_dim; `sm_scale` is that of the model's code, rope scaling apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentShape:
    """Heads and dimensions of a model's attention, before tensor parallelism, which splits query heads alone."""

    name: str
    source: str  # repository on the Hugging Face hub whose config.json says so
    num_q_heads: int
    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128  # of a head before absorption

    @property
    def sm_scale(self) -> float:
        """Factor on the logits, without the factor that YaRN adds in long-context models."""
        return (self.nope_dim + self.rope_dim) ** -0.5

    def per_shard(self, num_shards: int) -> int:
        """Query heads of one of `num_shards` tensor-parallel shards; every shard holds all latents.

        Raises:
            ValueError: the heads do not divide.
        """
        if num_shards < 1 or self.num_q_heads % num_shards:
            raise ValueError(
                f"{self.name}: expected shards that divide {self.num_q_heads} query heads, got {num_shards}"
            )
        return self.num_q_heads // num_shards


SHAPES = (
    LatentShape("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 16),
    LatentShape("deepseek-v3", "deepseek-ai/DeepSeek-V3", 128),
    LatentShape("kimi-k2", "moonshotai/Kimi-K2-Instruct", 64),
)
