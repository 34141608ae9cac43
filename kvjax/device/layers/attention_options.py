"""How one attention layer attends: what a model passes to its `attend` callable beside q, k and v.

Flow:    model's attention layer -> [AttentionOptions] -> StepCache (serving) or dense attention (training)
Source:  the keyword arguments of pallas_kernels.ragged_paged_attention
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Scale, mask and extras of one layer. Query at position p sees the keys that every given bound allows."""

    sm_scale: float  # scores are q . k * sm_scale
    sliding_window: int | None = None  # the last `sliding_window` tokens, p included
    attention_chunk_size: int | None = None  # only keys of p's chunk: p // chunk
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    num_sink_tokens: int = 0  # the first tokens that every query sees whatever its window
    sees_prompt: bool = False  # every query sees its request's prompt whatever its window (R-SWA)
    sinks: jax.Array | None = None  # float32[num_q_heads] logits that take part in the softmax without a value
    k_scale: jax.Array | None = None  # float32[] or [num_kv_heads]: pages hold K / k_scale
    v_scale: jax.Array | None = None  # float32[] or [num_kv_heads]
