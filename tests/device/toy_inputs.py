"""Tiny models that take more than tokens, and what they compute over a whole sequence, written from the definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.device import AttentionOptions
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from tests.device.toy import (
    DENSE_LENGTH,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    Q_HEADS,
    VOCAB,
    WINDOW,
    ToyAttention,
    dense_attend,
)

ENCODER_SHAPES = {(6, 5): 3, (14, 5): 7}  # two rows of features make an encoder token
CROSS_HEADS = 2
EMBED_DIM = 12
PLACEHOLDER = 30  # a token that vectors stand for


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    """A window in layer 0, full attention in layer 1."""

    @property
    def cache_words(self) -> str:
        return "toy layers"

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        sizes = {"block_size": block_size or 4, "head_size": HEAD_DIM, "dtype": dtype or self.dtype}
        return {
            "layers.0": SlidingWindowSpec(**sizes, num_kv_heads=KV_HEADS, sliding_window=WINDOW),
            "layers.1": FullAttentionSpec(**sizes, num_kv_heads=KV_HEADS),
        }


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ToyConfig):
    """After each of the layers one of cross attention."""

    @property
    def encoder_shapes(self) -> Mapping[tuple[int, ...], int]:
        return ENCODER_SHAPES

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        cross = CrossAttentionSpec(
            block_size=block_size or 4,
            num_kv_heads=CROSS_HEADS,
            head_size=HEAD_DIM,
            dtype=dtype or self.dtype,
            max_num_encoder_tokens=7,
        )
        return super().kv_cache_specs(block_size, dtype) | {f"layers.{i}.cross": cross for i in range(2)}


@dataclass(frozen=True, kw_only=True)
class VectorConfig(ToyConfig):
    """Takes vectors for placeholder tokens; with `mrope` positions have three axes."""

    mrope: bool = False

    @property
    def embedding_dim(self) -> int:
        return EMBED_DIM

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        return (PLACEHOLDER,)

    @property
    def has_mrope(self) -> bool:
        return self.mrope


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class ToyCross(nnx.Module):
    """Cross attention of one layer, and what the encoder makes for it."""

    def __init__(self, layer: int, rngs: nnx.Rngs) -> None:
        self.name = f"layers.{layer}.cross"
        self.q, self.out = linear(HIDDEN, Q_HEADS * HEAD_DIM, rngs), linear(Q_HEADS * HEAD_DIM, HIDDEN, rngs)
        self.k, self.v = (linear(HIDDEN, CROSS_HEADS * HEAD_DIM, rngs) for _ in range(2))

    def keys_and_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(project(encoded).reshape(-1, CROSS_HEADS, HEAD_DIM) for project in (self.k, self.v))

    def __call__(self, x: jax.Array, cache: Any) -> jax.Array:
        q = self.q(x).reshape(-1, Q_HEADS, HEAD_DIM)
        attended = cache.attend_cross(self.name, q, AttentionOptions(sm_scale=2 * HEAD_DIM**-0.5))
        return self.out(attended.reshape(x.shape[0], -1))


class ToyInputModel(nnx.Module):
    """Two layers of attention on embeddings of tokens or vectors and of positions; cross attention after each."""

    def __init__(self, config: ToyConfig) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.vector = linear(EMBED_DIM, HIDDEN, rngs)
        self.frontend = linear(10, HIDDEN, rngs)
        self.layers = nnx.List([ToyAttention(i, KV_HEADS, rngs) for i in range(2)])
        self.crosses = nnx.List([ToyCross(i, rngs) for i in range(2)]) if config.encoder_shapes else None
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def encode(self, features: jax.Array, cache: Any) -> None:
        encoded = jnp.tanh(self.frontend(features.reshape(-1, 10)))
        encoded = encoded + encoded.mean(axis=0)  # every encoder token sees the others
        for cross in self.crosses:
            cache.write_cross(cross.name, *cross.keys_and_values(encoded))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: Any,
        embeds: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        x = self.embed(token_ids)
        if embeds is not None:
            vectors, index = embeds
            x = jnp.where(index[:, None] >= 0, self.vector(vectors[jnp.maximum(index, 0)]), x)
        weights = jnp.array([1.0, 1.7, 2.9])[: 3 if positions.ndim == 2 else 1]
        angle = weights @ jnp.atleast_2d(positions).astype(jnp.float32)
        x = x + 0.6 * jnp.sin(angle[:, None] / (10.0 ** jnp.linspace(0, 2, HIDDEN)))
        for i, layer in enumerate(self.layers):
            x = x + jnp.tanh(layer(x, cache))
            if self.crosses is not None:
                x = x + jnp.tanh(self.crosses[i](x, cache))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head(hidden) * 3.0


class DenseInputs:
    """One whole sequence, and one encoder input: softmax over all of it for every query."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[jax.Array, jax.Array]] = {}

    def write_cross(self, layer_name: str, k: jax.Array, v: jax.Array) -> None:
        self.written[layer_name] = (k, v)

    def attend_cross(self, layer_name: str, q: jax.Array, options: AttentionOptions) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in self.written[layer_name])
        scores = jnp.einsum("qhd,khd->hqk", q, k) * options.sm_scale
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)

    def __call__(self, *arguments: Any) -> jax.Array:
        return dense_attend(*arguments)


@nnx.jit
def _dense(
    model: ToyInputModel, token_ids: jax.Array, positions: jax.Array, features: Any, vectors: Any, index: Any
) -> jax.Array:
    cache = DenseInputs()
    if features is not None:
        model.encode(features, cache)
    embeds = {} if vectors is None else {"embeds": (vectors, index)}
    return model.logits(model(token_ids, positions, cache, **embeds))


def dense_logits(
    model: ToyInputModel,
    token_ids: list[int],
    *,
    features: np.ndarray | None = None,
    vectors: np.ndarray | None = None,  # for the first placeholder tokens, in order
    positions: np.ndarray | None = None,  # [3, k] of the first tokens; those behind follow as text
) -> np.ndarray:  # [length, VOCAB]
    """Logits after every token of one sequence; padded at its end, which causal attention does not see."""
    tokens, index = np.zeros(DENSE_LENGTH, np.int32), np.full(DENSE_LENGTH, -1, np.int32)
    tokens[: len(token_ids)] = token_ids
    places = np.arange(DENSE_LENGTH, dtype=np.int32)
    if positions is not None:
        places = np.tile(places - positions.shape[1] + positions.max() + 1, (3, 1)).astype(np.int32)
        places[:, : positions.shape[1]] = positions
    padded = None
    if vectors is not None:
        index[np.flatnonzero(np.array(token_ids) == PLACEHOLDER)[: len(vectors)]] = np.arange(len(vectors))
        padded = np.zeros((DENSE_LENGTH, EMBED_DIM), np.float32)
        padded[: len(vectors)] = vectors
    return np.asarray(_dense(model, tokens, places, features, padded, index))[: len(token_ids)]


def loaded(config: ToyConfig) -> LoadedModel:
    """With weights drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: ToyInputModel(config)))
    weights = jax.tree.map(lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape), x.dtype), state)
    return LoadedModel(config, nnx.merge(graphdef, weights), None)


def toy_model(kind: str) -> LoadedModel:
    """ "encoder", "vectors" or "mrope"."""
    common = {"architecture": "Toy", "num_layers": 2, "vocab_size": VOCAB, "max_model_len": DENSE_LENGTH}
    if kind == "encoder":
        return loaded(EncoderConfig(**common))
    return loaded(VectorConfig(**common, mrope=kind == "mrope"))
