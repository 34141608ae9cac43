"""Small decoders made of any attention layers, and what a test of a kind checks: served requests equal dense ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.device import AttentionOptions, Bucket, Buckets, Placement, UpdateStep, make_update_step
from kvjax.planning import plan_kv_cache
from tests.device.dense_cache import DenseCache
from tests.device.serving import Server

VOCAB, HIDDEN, MAX_MODEL_LEN, HASH_BLOCK = 31, 16, 64, 4
BUCKETS = Buckets((Bucket(64, 4, MAX_MODEL_LEN // HASH_BLOCK),))
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Without a bias."""
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class KVLayer(nnx.Module):
    """Attention over K and V per head."""

    def __init__(
        self,
        name: str,
        rngs: nnx.Rngs,
        options: AttentionOptions,
        *,
        heads: tuple[int, int] = (8, 4),
        dims: tuple[int, int] = (8, 8),
        has_sinks: bool = False,
        shares: bool = False,
    ) -> None:
        self.name, self.options, self.heads, self.dims, self.shares = name, options, heads, dims, shares
        self.q = linear(HIDDEN, heads[0] * dims[0], rngs)
        if not shares:
            self.k, self.v = linear(HIDDEN, heads[1] * dims[0], rngs), linear(HIDDEN, heads[1] * dims[1], rngs)
        if has_sinks:
            self.sinks = nnx.Param(jax.random.normal(rngs.params(), (heads[0],)))
        self.out = linear(heads[0] * dims[1], HIDDEN, rngs)
        self.has_sinks = has_sinks

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        q = self.q(x).reshape(-1, self.heads[0], self.dims[0])
        k = v = None
        if not self.shares:
            k, v = (
                project(x).reshape(-1, self.heads[1], dim)
                for project, dim in zip((self.k, self.v), self.dims, strict=True)
            )
        options = replace(self.options, sinks=self.sinks[...]) if self.has_sinks else self.options
        return self.out(cache(self.name, q, k, v, options).reshape(x.shape[0], -1))


class LatentLayer(nnx.Module):
    """Multi-head latent attention, absorbed."""

    def __init__(
        self,
        name: str,
        rngs: nnx.Rngs,
        options: AttentionOptions,
        *,
        heads: int = 4,
        dims: tuple[int, int] = (10, 4),
        has_sinks: bool = False,
        shares: bool = False,
    ) -> None:
        self.name, self.options, self.heads, self.dims, self.shares = name, options, heads, dims, shares
        self.q = linear(HIDDEN, heads * sum(dims), rngs)
        if not shares:
            self.kv = linear(HIDDEN, sum(dims), rngs)
        if has_sinks:
            self.sinks = nnx.Param(jax.random.normal(rngs.params(), (heads,)))
        self.out = linear(heads * dims[0], HIDDEN, rngs)
        self.has_sinks = has_sinks

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        q_nope, q_pe = jnp.split(self.q(x).reshape(-1, self.heads, sum(self.dims)), [self.dims[0]], axis=-1)
        latent, key_pe = (None, None) if self.shares else jnp.split(self.kv(x), [self.dims[0]], axis=-1)
        options = replace(self.options, sinks=self.sinks[...]) if self.has_sinks else self.options
        return self.out(cache.attend_latent(self.name, q_nope, q_pe, latent, key_pe, options).reshape(x.shape[0], -1))


class CompressedLayer(nnx.Module):
    """DeepSeek V4's: a window, entries of `ratio` tokens (0: none), and an indexer where `topk` says how many it picks.

    Vectors that are stored are made of the input number by number, so that they are the same in steps of any size.
    """

    def __init__(
        self,
        layer: int,
        rngs: nnx.Rngs,
        options: AttentionOptions,
        *,
        ratio: int = 0,
        coff: int = 1,
        topk: int | None = None,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 6),
    ) -> None:
        def scales(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape))

        self.name, self.options, self.ratio, self.topk = f"layers.{layer}", options, ratio, topk
        self.heads, self.dims = heads, dims
        self.q, self.out = linear(HIDDEN, heads[0] * dims[0], rngs), linear(heads[0] * dims[0], HIDDEN, rngs)
        self.sinks, self.kv = scales(heads[0]), scales(dims[0])
        if ratio:
            self.compressed, self.scores = scales(coff * dims[0]), scales(coff * dims[0])
            self.bias = scales(ratio, coff * dims[0])
        if topk is not None:
            self.index_q, self.weights = linear(HIDDEN, heads[1] * dims[1], rngs), linear(HIDDEN, heads[1], rngs)
            self.index_kv, self.index_scores = scales(coff * dims[1]), scales(coff * dims[1])
            self.index_bias = scales(ratio, coff * dims[1])

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        indices = None
        entries = f"{self.name}.compressed" if self.ratio else None
        if entries is not None:
            kv, scores = scaled(x, self.compressed), scaled(x, self.scores)
            cache.compress(entries, kv, scores, self.bias[...], finish, states=f"{self.name}.states")
        if self.topk is not None:
            keys, states = f"{self.name}.indexer", f"{self.name}.indexer_states"
            kv, scores = scaled(x, self.index_kv), scaled(x, self.index_scores)
            cache.compress(keys, kv, scores, self.index_bias[...], finish, states=states)
            q = self.index_q(x).reshape(-1, self.heads[1], self.dims[1])
            indices = cache.pick_entries(keys, q, self.weights(x), self.topk)
        q = self.q(x).reshape(-1, self.heads[0], self.dims[0])
        options = replace(self.options, sinks=self.sinks[...])
        out = cache.attend_compressed(
            f"{self.name}.window", q, scaled(x, self.kv), options, indices, compressed=entries
        )
        return self.out(out.reshape(x.shape[0], -1))


def scaled(x: jax.Array, scales: nnx.Param) -> jax.Array:
    """[T, n] numbers of the input over and over, each times its scale."""
    n = scales.shape[-1]
    return jnp.tile(x, (1, -(-n // x.shape[1])))[:, :n] * scales[...]


def finish(entries: jax.Array, positions: jax.Array) -> jax.Array:
    """As a model norms and rotates."""
    return entries * (1 + 0.1 * positions.astype(jnp.float32)[:, None] % 0.7)


MakeLayers = Callable[[nnx.Rngs], Sequence[nnx.Module]]


class ToyDecoder(nnx.Module):
    """Layers on token and position embeddings."""

    def __init__(self, make_layers: MakeLayers) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List(list(make_layers(rngs)))
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        angle = positions[:, None].astype(jnp.float32) / (10.0 ** jnp.linspace(0, 2, HIDDEN))
        x = self.embed(token_ids) + 0.3 * jnp.sin(angle)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x, positions, cache))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head(hidden) * 3.0


def random_decoder(make_layers: MakeLayers) -> ToyDecoder:
    """With weights drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: ToyDecoder(make_layers)))
    weights = jax.tree.map(lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape), x.dtype), state)
    return nnx.merge(graphdef, weights)


@dataclass(frozen=True)
class Toy:
    """A decoder, its config, and the compiled step over both."""

    model: ToyDecoder
    config: KVCacheConfig
    step: UpdateStep
    dense: Callable[[], DenseCache]

    @classmethod
    def of(
        cls,
        specs: Mapping[str, KVCacheSpec],
        make_layers: MakeLayers,
        *,
        shared_layers: Mapping[str, str] | None = None,
        dense: Callable[[], DenseCache] | None = None,
        platform: str = "cpu",
        placement: Placement | None = None,
        num_blocks: int = 3000,
    ) -> Toy:
        """Planned by the general rules, pages enough for every test."""
        plan = plan_kv_cache(
            specs,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=BUCKETS.max_num_tokens,
            platform=platform,
        )
        config = replace(plan.config, shared_layers=tuple((shared_layers or {}).items()))
        model = random_decoder(make_layers)
        step = make_update_step(model, config, BUCKETS, placement=placement)
        return cls(model, config, step, dense or (lambda: DenseCache(dict(shared_layers or {}))))

    @property
    def hit_unit(self) -> int:
        """Hits are multiples of it: blocks of all groups end there."""
        return lcm(*(group.kv_cache_spec.block_size for group in self.config.kv_cache_groups))

    def server(self) -> Server:
        return Server(self.step, HASH_BLOCK, MAX_MODEL_LEN)

    def dense_logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after each token of one sequence; padded at its end, which causal attention does not see."""
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_dense(self.model, padded, self.dense))[: len(tokens)]

    def check(self, server: Server, name: str) -> None:
        """Every generated token of a request had the logits of the whole sequence before it."""
        logits = np.array(server.logits[name])
        whole = self.dense_logits(server.tokens[name])
        np.testing.assert_allclose(logits, whole[-1 - len(logits) : -1], **CLOSE)


@nnx.jit(static_argnums=2)
def _dense(model: ToyDecoder, token_ids: jax.Array, dense: Callable[[], DenseCache]) -> jax.Array:
    return model.logits(model(token_ids, jnp.arange(MAX_MODEL_LEN), dense()))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def serve_mixed(toy: Toy, budget: int) -> Server:
    """Requests that share prefixes and not, prefilled in chunks of `budget` tokens while others decode; all checked."""
    server, first, unit = toy.server(), prompt(0, 29), toy.hit_unit
    server.run({"a": first}, 4, budget)
    prompts = {"b": first[:23] + prompt(1, 7), "c": prompt(2, 1), "d": first + prompt(3, 2), "e": prompt(4, 26)}
    assert server.run(prompts, 8, budget) == {"b": 23 // unit * unit, "c": 0, "d": 29 // unit * unit, "e": 0}
    for name in ("a", *prompts):
        toy.check(server, name)
    return server
