"""Lightning indexer of DeepSeek V3.2 and GLM 5: by keys of its own it picks the tokens that a query attends to.

Flow:    hidden[T, d], queries before their last projection -> [TokenIndexer], cache.pick_tokens -> int32[T, topk]
Source:  DeepSeek V3.2 (arXiv 2512.02556, section 2.1); transformers' modeling_{deepseek_v32,glm_moe_dsa}.py

The score of a token is `sum over heads of weight * relu(q . key)`. The Hadamard transform of released code turns
queries and keys alike and leaves products as they are, so it is left out. Attributes are named as the checkpoint's
tensors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.latent_attention import TokenIndexerConfig
from kvjax.models.layers.attention.temperature import HeadScales
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.rotary import RopeTables, apply_rope


class TokenIndexer(nnx.Module):
    """The indexer of one layer, over a cache of keys `{layer}.indexer`."""

    def __init__(self, size: int, query_rank: int, config: TokenIndexerConfig, layer_name: str, make: Make) -> None:
        self.wq_b = make.linear(query_rank, config.num_heads * config.head_dim)
        self.wk = make.linear(size, config.head_dim)
        self.k_norm = make.layer_norm(config.head_dim, eps=config.norm_eps)
        self.weights_proj = make.linear(size, config.num_heads)
        if config.has_own_queries:
            self.q_input_norm = make.layer_norm(query_rank, eps=config.norm_eps)
            self.softmax_scaling = HeadScales(config.num_heads, make)
        self.config = config
        self.cache_name = f"{layer_name}.indexer"

    def __call__(
        self,
        hidden: jax.Array,  # [T, d]
        queries: jax.Array,  # [T, rank], hidden states themselves where they have full rank
        step: ForwardStep,
        tables: RopeTables | None,  # of the shared key, whose dimensions are rotated here too; None: none are
    ) -> jax.Array:  # int32[T, topk] -1: none
        """Tokens of each one's request, those of the best scores, or all where there are no more than `topk`."""
        config = self.config
        q = self.wq_b(self.q_input_norm(queries) if config.has_own_queries else queries)
        q = q.reshape(-1, config.num_heads, config.head_dim)
        if config.has_own_queries:
            q = self.softmax_scaling(q, step.positions)
        key = self.k_norm(self.wk(hidden))[:, None]
        if tables is not None:
            q, key = (apply_rope(x, tables, interleaved=config.rope_interleaved) for x in (q, key))
        weights = self.weights_proj(hidden).astype(jnp.float32) * (config.num_heads * config.head_dim) ** -0.5
        topk = min(config.topk, step.max_model_len)
        picked: jax.Array = step.cache.pick_tokens(self.cache_name, q, weights, key[:, 0], topk)
        return picked
