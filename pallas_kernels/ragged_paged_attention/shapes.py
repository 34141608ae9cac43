"""Real model shapes, for tests, benchmarks and tuning.

Source: each model's config.json on its public model page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """Heads and mask of one kind of layer of a model, before tensor parallelism."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


SHAPES = (
    AttentionShape("llama3-8b", 32, 8, 128),
    AttentionShape("llama3-70b", 64, 8, 128),
    AttentionShape("qwen3-8b", 32, 8, 128),
    AttentionShape("qwen3-235b-a22b", 64, 4, 128),
    AttentionShape("gemma3-27b-local", 32, 16, 128, sliding_window=1024),
    AttentionShape("gemma3-27b-global", 32, 16, 128),
    AttentionShape("gpt-oss-120b-local", 64, 8, 64, sliding_window=128, sinks=True),
    AttentionShape("gpt-oss-120b-global", 64, 8, 64, sinks=True),
    AttentionShape("llama4-scout-local", 40, 8, 128, attention_chunk_size=8192),
    AttentionShape("llama4-scout-global", 40, 8, 128),
    AttentionShape("jamba-1.5-large", 64, 8, 128),
)
