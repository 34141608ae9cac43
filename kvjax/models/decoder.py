"""A decoder-only language model over the flat tokens of a step.

Flow:    token_ids[T], positions[T], attend -> [Decoder] -> hidden[T, d] -> [Decoder.logits] -> float32[N, vocab]
Source:  transformers' modeling_{llama,qwen3,gemma3}.py, with whose outputs it agrees
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.config import ModelConfig
from kvjax.models.layers import Attend, Attention, FeedForward, make_norm
from kvjax.models.rotary import rope_tables


class PreNormBlock(nnx.Module):
    """One layer of Llama and Qwen3: a norm before attention and one before the feed-forward part."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)
        self.input_layernorm = make_norm(config, config.hidden_size, dtype)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype)

    def __call__(self, hidden: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        """Hidden states [T, d] after the layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SandwichNormBlock(nnx.Module):
    """One layer of Gemma 3: norms before and after attention, before and after the feed-forward part."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)
        self.input_layernorm = make_norm(config, config.hidden_size, dtype)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size, dtype)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, dtype)

    def __call__(self, hidden: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        """Hidden states [T, d] after the layer."""
        attended = self.self_attn(self.input_layernorm(hidden), rope, attend)
        hidden = hidden + self.post_attention_layernorm(attended)
        return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))


class Decoder(nnx.Module):
    """Llama, Qwen3 or Gemma 3 text, as `config.family` says. Stateless: what attention remembers is `attend`'s."""

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs) -> None:
        """Random weights.

        Raises:
            NotImplementedError: the config has experts or multimodal positions.
        """
        if config.is_planning_only:
            raise NotImplementedError(
                f"expected a dense text model, got {config.architecture}: it can be planned for but not run"
            )
        param_dtype = jnp.dtype(dtype)
        block = SandwichNormBlock if config.family == "gemma3" else PreNormBlock
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(config.hidden_size**-0.5),
            rngs=rngs,
        )
        self.layers = nnx.List([block(config, i, dtype=param_dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = make_norm(config, config.hidden_size, param_dtype)
        if not config.tie_word_embeddings:
            init = nnx.initializers.normal(config.hidden_size**-0.5)
            self.lm_head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                param_dtype=param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        positions: jax.Array,  # int32[T]
        attend: Attend,
    ) -> jax.Array:  # [T, d]
        """Normed hidden states of the last layer; padding tokens give values that mean nothing."""
        config = self.config
        hidden = jnp.take(self.embed_tokens.embedding[...], token_ids, axis=0, mode="clip")
        if config.family == "gemma3":
            hidden = hidden * jnp.asarray(config.hidden_size**0.5, hidden.dtype)
        ropes = {
            kind: rope_tables(config.rope_of(kind), positions, config.head_dim)
            for kind in sorted(set(config.layer_types))
        }
        for block, kind in zip(self.layers, config.layer_types, strict=True):
            hidden = block(hidden, ropes[kind], attend)
        return self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, d] -> float32[N, vocab]
        """Scores of the next token, after the final soft cap if the model has one."""
        config = self.config
        if config.tie_word_embeddings:
            scores = hidden @ self.embed_tokens.embedding[...].T
        else:
            scores = self.lm_head(hidden)
        scores = scores.astype(jnp.float32)
        cap = config.final_logit_soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)
