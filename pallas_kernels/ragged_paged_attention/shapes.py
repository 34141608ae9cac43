"""Real model shapes, for tests, benchmarks and tuning.

Source: the config.json on each model's public page (`AttentionShape.source`): num_attention_heads,
num_key_value_heads, head_dim (else hidden_size / num_attention_heads), sliding_window, attention_chunk_size,
query_pre_attn_scalar (Gemma 3: 168 = 5376 / 32, so `sm_scale` is 168 ** -0.5).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """Heads and mask of one kind of layer of a model, before tensor parallelism."""

    name: str
    source: str  # repository on the Hugging Face hub whose config.json says so
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    query_scalar: int | None = None  # sm_scale is its -0.5th power; None: head_dim

    @property
    def sm_scale(self) -> float:
        """Factor on the logits."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def per_shard(self, num_shards: int) -> tuple[int, int]:
        """(query heads, KV heads) of one of `num_shards` tensor-parallel shards; KV heads are replicated beyond one.

        Raises:
            ValueError: the heads do not divide.
        """
        wide, narrow = max(num_shards, self.num_kv_heads), min(num_shards, self.num_kv_heads)
        if num_shards < 1 or self.num_q_heads % num_shards or wide % narrow:
            raise ValueError(
                f"{self.name}: expected shards that divide {self.num_q_heads} query heads and divide or are a multiple "
                f"of {self.num_kv_heads} KV heads, got {num_shards}"
            )
        return self.num_q_heads // num_shards, max(1, self.num_kv_heads // num_shards)


SHAPES = (
    AttentionShape("llama3-8b", "meta-llama/Meta-Llama-3-8B", 32, 8, 128),
    AttentionShape("llama3.2-1b", "meta-llama/Llama-3.2-1B", 32, 8, 64),
    AttentionShape("llama3-70b", "meta-llama/Meta-Llama-3-70B", 64, 8, 128),
    AttentionShape("qwen3-8b", "Qwen/Qwen3-8B", 32, 8, 128),
    AttentionShape("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 64, 4, 128),
    AttentionShape("gemma3-27b-local", "google/gemma-3-27b-it", 32, 16, 128, sliding_window=1024, query_scalar=168),
    AttentionShape("gemma3-27b-global", "google/gemma-3-27b-it", 32, 16, 128, query_scalar=168),
    AttentionShape("gemma2-27b-local", "google/gemma-2-27b", 32, 16, 128, 4096, soft_cap=50.0, query_scalar=144),
    AttentionShape("gpt-oss-120b-local", "openai/gpt-oss-120b", 64, 8, 64, sliding_window=128, sinks=True),
    AttentionShape("gpt-oss-120b-global", "openai/gpt-oss-120b", 64, 8, 64, sinks=True),
    AttentionShape("llama4-scout-local", "meta-llama/Llama-4-Scout-17B-16E", 40, 8, 128, attention_chunk_size=8192),
    AttentionShape("llama4-scout-global", "meta-llama/Llama-4-Scout-17B-16E", 40, 8, 128),
    AttentionShape(
        "llama4-maverick-local", "meta-llama/Llama-4-Maverick-17B-128E", 40, 8, 128, attention_chunk_size=8192
    ),
    AttentionShape("llama4-maverick-global", "meta-llama/Llama-4-Maverick-17B-128E", 40, 8, 128),
    AttentionShape("jamba-1.5-large", "ai21labs/AI21-Jamba-1.5-Large", 64, 8, 128),
)
