"""DeepSeek V4's attention: a window of latents, and entries of several tokens beside it, in one softmax.

Flow:    hidden[T, d] -> [Compressor] -> entries; [Indexer] -> which of them; [CompressedAttention] -> hidden[T, d]
Source:  transformers' modeling_deepseek_v4.py

A latent is key and value of all heads. So values are rotated, and outputs are turned back by their query's position.
Attributes are named as the tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models.configs.deepseek_v4 import CompressionConfig, DeepseekV4Config
from kvjax.models.configs.rope import RopeConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import rms_normed
from kvjax.models.layers.rotary import RopeTables, apply_rope, rope_tables
from kvjax.models.tensor_sources import TensorSource, Whole


def rotated_last(x: jax.Array, tables: RopeTables) -> jax.Array:  # [T, H, D]
    """`x` with its last dimensions rotated, 2i and 2i + 1 of them together."""
    kept, turned = jnp.split(x, [x.shape[-1] - 2 * tables[0].shape[-1]], axis=-1)
    return jnp.concatenate([kept, apply_rope(turned, tables, interleaved=True)], axis=-1)


class Compressor(nnx.Module):
    """Makes an entry of several tokens: for each number a mean over them, weighted by a softmax of scores."""

    def __init__(self, config: DeepseekV4Config, compression: CompressionConfig, dim: int, make: Make) -> None:
        width = compression.series * dim
        self.wkv = make.linear(config.hidden_size, width)
        self.wgate = make.linear(config.hidden_size, width)
        self.ape = make.float32_normal(compression.ratio, width)
        self.norm = make.norm(dim, eps=config.rms_norm_eps)
        self.rope = config.rope_compressed
        self.head_dim = config.head_dim  # whose share is rotated

    def __call__(self, hidden: jax.Array, step: ForwardStep, *, entries: str, states: str) -> None:
        """Writes the entries that the step completes to the cache `entries`."""

        def finish(vectors: jax.Array, positions: jax.Array) -> jax.Array:
            tables = rope_tables(self.rope, jnp.maximum(positions, 0), self.head_dim, step.max_model_len)
            return rotated_last(self.norm(vectors)[:, None], tables)[:, 0].astype(hidden.dtype)

        step.cache.compress(entries, self.wkv(hidden), self.wgate(hidden), self.ape[...], finish, states=states)


class Indexer(nnx.Module):
    """Picks a query's entries, by keys of its own."""

    def __init__(self, config: DeepseekV4Config, compression: CompressionConfig, make: Make) -> None:
        indexer = config.indexer
        self.wq_b = make.linear(config.query_rank, indexer.num_heads * indexer.head_dim)
        self.weights_proj = make.linear(config.hidden_size, indexer.num_heads)
        self.compressor = Compressor(config, compression, indexer.head_dim, make)
        self.config = indexer

    def __call__(
        self, hidden: jax.Array, queries: jax.Array, step: ForwardStep, tables: RopeTables, layer_name: str
    ) -> jax.Array:  # int32[T, topk]
        """Entries of the layer's cache, -1 after the last; `queries` [T, rank] before their last projection."""
        config, cache = self.config, f"{layer_name}.indexer"
        self.compressor(hidden, step, entries=cache, states=f"{layer_name}.indexer_states")
        q = self.wq_b(queries).reshape(-1, config.num_heads, config.head_dim)
        weights = self.weights_proj(hidden).astype(jnp.float32) * (config.num_heads * config.head_dim) ** -0.5
        picked: jax.Array = step.cache.pick_entries(cache, rotated_last(q, tables), weights, config.topk)
        return picked


class CompressedAttention(nnx.Module):
    """Self-attention of one layer."""

    def __init__(self, config: DeepseekV4Config, layer: int, make: Make) -> None:
        size, heads, dim, groups = config.hidden_size, config.num_heads, config.head_dim, config.out_groups
        compression = config.compression[layer]
        self.wq_a = make.linear(size, config.query_rank)
        self.q_norm = make.norm(config.query_rank, eps=config.rms_norm_eps)
        self.wq_b = make.columns(config.query_rank, heads * dim, units=heads)
        self.wkv = make.linear(size, dim)
        self.kv_norm = make.norm(dim, eps=config.rms_norm_eps)
        self.attn_sink = make.float32_zeros(heads)
        self.wo_a = make.param(groups, config.out_rank, heads // groups * dim, scale=(heads // groups * dim) ** -0.5)
        self.wo_b = make.rows(groups * config.out_rank, size, units=groups)
        if compression is not None:
            self.compressor = Compressor(config, compression, dim, make)
            if compression.is_indexed:
                self.indexer = Indexer(config, compression, make)
        self.compression = compression
        self.config = config
        self.rope: RopeConfig = config.rope if compression is None else config.rope_compressed
        self.layer_name = f"layers.{layer}"
        self.options = AttentionOptions(sm_scale=dim**-0.5, sliding_window=config.sliding_window)

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Heads, and groups of them."""
        return {"attn_sink": (0, self.config.num_heads), "wo_a": (0, self.config.out_groups)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Groups stand one below the other."""
        groups, rank, inner = self.wo_a.shape
        return {"wo_a": Whole("wo_a.weight", shape=(groups * rank, inner))}

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """Attention over the layer's window and entries, the step's own tokens included."""
        config, name = self.config, self.layer_name
        tables = step.rope_tables(self.rope, config.head_dim)
        queries = self.q_norm(self.wq_a(hidden))
        q = self.wq_b(queries).reshape(-1, config.num_heads, config.head_dim)
        q = rotated_last(rms_normed(q, config.rms_norm_eps).astype(q.dtype), tables)
        kv = rotated_last(self.kv_norm(self.wkv(hidden))[:, None], tables)[:, 0]
        entries, indices = self._entries(hidden, queries, step, tables)
        options = replace(self.options, sinks=self.attn_sink[...])
        out = step.cache.attend_compressed(f"{name}.window", q, kv, options, indices, compressed=entries)
        out = rotated_last(out, (tables[0], -tables[1]))
        grouped = out.reshape(hidden.shape[0], config.out_groups, -1)
        return self.wo_b(jnp.einsum("tgi,gri->tgr", grouped, self.wo_a[...]).reshape(hidden.shape[0], -1))

    def _entries(
        self, hidden: jax.Array, queries: jax.Array, step: ForwardStep, tables: RopeTables
    ) -> tuple[str | None, jax.Array | None]:
        """The cache of the layer's entries, after those of the step are written, and which of them each token sees."""
        if self.compression is None:
            return None, None
        entries = f"{self.layer_name}.compressed"
        self.compressor(hidden, step, entries=entries, states=f"{self.layer_name}.states")
        if not self.compression.is_indexed:
            return entries, None
        return entries, self.indexer(hidden, queries, step, tables, self.layer_name)
