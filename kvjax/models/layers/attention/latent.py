"""Multi-head latent attention, absorbed: queries meet latents, so that no head's keys and values are ever made.

Flow:    hidden[T, d] -> queries, latent, shared key -> [LatentAttention], cache.attend_latent -> hidden[T, d]
         queries before their last projection -> TokenIndexer -> the tokens that are seen, where they are picked
Source:  DeepSeek V2 (arXiv 2405.04434, section 2.1 and appendix C); transformers' modeling_deepseek_{v2,v3}.py

A head's key is `key_up @ latent`, so a score is `q . (key_up @ latent) = (q @ key_up) . latent`; and its output is the
weighted sum of latents times `value_up`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models.configs.latent_attention import LatentAttentionConfig
from kvjax.models.layers.attention.temperature import HeadScales
from kvjax.models.layers.attention.token_indexer import TokenIndexer
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.rotary import RopeTables, apply_rope
from kvjax.models.tensor_sources import HeadPart, TensorSource


class LatentAttention(nnx.Module):
    """Self-attention of one layer over a cache of latents.

    Where tokens are picked, a layer without an indexer sees those of the last layer with one.
    """

    def __init__(
        self,
        size: int,
        config: LatentAttentionConfig,
        layer_name: str,
        make: Make,
        *,
        indexer: TokenIndexer | None = None,
        shares: bool = False,  # it reads the latents of another layer
    ) -> None:
        heads, latent_dim, rank = config.num_heads, config.latent_dim, config.query_rank
        if rank is None:
            self.q_proj = make.columns(size, heads * config.key_dim, units=heads)
        else:
            self.q_a_proj = make.linear(size, rank, bias=config.bias)
            self.q_a_layernorm = make.norm(rank, eps=config.norm_eps)
            self.q_b_proj = make.columns(rank, heads * config.key_dim, units=heads)
        if config.scales_queries:
            self.softmax_scaling = HeadScales(heads, make)
        if not shares:
            self.kv_a_proj_with_mqa = make.linear(size, latent_dim + config.rope_dim, bias=config.bias)
            self.kv_a_layernorm = make.norm(latent_dim, eps=config.norm_eps)
        self.key_up = make.param(heads, config.nope_dim, latent_dim, scale=latent_dim**-0.5)
        self.value_up = make.param(heads, config.value_dim, latent_dim, scale=latent_dim**-0.5)
        self.o_proj = make.rows(heads * config.value_dim, size, bias=config.bias, units=heads)
        self.indexer = indexer
        self.shares = shares
        self.config = config
        self.layer_name = layer_name
        self.options = AttentionOptions(sm_scale=config.sm_scale)

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Heads."""
        return {"key_up": (0, self.config.num_heads), "value_up": (0, self.config.num_heads)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Where a head's projections to its key and value lie in `kv_b_proj`."""
        keys, total = self.config.nope_dim, self.config.nope_dim + self.config.value_dim
        return {
            "key_up": HeadPart("kv_b_proj.weight", 0, total),
            "value_up": HeadPart("kv_b_proj.weight", keys, total),
        }

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """Attention over the layer's cache, the step's own tokens included."""
        config = self.config
        queries = self._query_latents(hidden)
        q = self._queries(queries).reshape(hidden.shape[0], config.num_heads, config.key_dim)
        if config.scales_queries:
            q = self.softmax_scaling(q, step.positions)
        q_nope, q_pe = jnp.split(q, [config.nope_dim], axis=-1)
        tables = None if config.rope is None else step.rope_tables(config.rope, config.rope_dim)
        if tables is not None:
            q_pe = apply_rope(q_pe, tables, interleaved=config.rope_interleaved)
        new = (None, None) if self.shares else self._latents(hidden, tables)
        if self.indexer is not None:
            step.picks = self.indexer(hidden, queries, step, tables)
        absorbed = jnp.einsum("thn,hnl->thl", q_nope, self.key_up[...])
        out = step.cache.attend_latent(self.layer_name, absorbed, q_pe, *new, self.options, *self._picks(step))
        values = jnp.einsum("thl,hvl->thv", out, self.value_up[...])
        return self.o_proj(values.reshape(hidden.shape[0], -1))

    def _latents(self, hidden: jax.Array, tables: RopeTables | None) -> tuple[jax.Array, jax.Array]:
        """Normed latents [T, latent_dim] and rotated keys [T, rope_dim] of the step's tokens."""
        latent, key_pe = jnp.split(self.kv_a_proj_with_mqa(hidden), [self.config.latent_dim], axis=-1)
        if tables is not None:
            key_pe = apply_rope(key_pe[:, None], tables, interleaved=self.config.rope_interleaved)[:, 0]
        return self.kv_a_layernorm(latent), key_pe

    def _picks(self, step: ForwardStep) -> tuple[jax.Array, ...]:
        """The tokens that are seen, as the last argument, where they are picked."""
        if self.config.indexer is None:
            return ()
        assert step.picks is not None  # the first layer has an indexer
        return (step.picks,)

    def _query_latents(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, rank]
        """What queries are projected from: hidden states themselves at full rank."""
        return hidden if self.config.query_rank is None else self.q_a_layernorm(self.q_a_proj(hidden))

    def _queries(self, latents: jax.Array) -> jax.Array:  # [T, rank] -> [T, heads * key_dim]
        return self.q_proj(latents) if self.config.query_rank is None else self.q_b_proj(latents)
