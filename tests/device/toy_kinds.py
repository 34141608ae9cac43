"""Small decoders made of any attention layers, and what a test of a kind checks: served requests equal dense ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
BUCKETS = Buckets((Bucket(48, 4, MAX_MODEL_LEN // HASH_BLOCK),))
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

    @classmethod
    def of(
        cls,
        specs: Mapping[str, KVCacheSpec],
        make_layers: MakeLayers,
        *,
        shared_layers: Mapping[str, str] | None = None,
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
        return cls(model, config, make_update_step(model, config, BUCKETS, placement=placement))

    def server(self) -> Server:
        return Server(self.step, HASH_BLOCK, MAX_MODEL_LEN)

    def dense_logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after each token of one sequence; padded at its end, which causal attention does not see."""
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_dense(self.model, padded, self.config.shared_layers))[: len(tokens)]

    def check(self, server: Server, name: str) -> None:
        """Every generated token of a request had the logits of the whole sequence before it."""
        logits = np.array(server.logits[name])
        whole = self.dense_logits(server.tokens[name])
        np.testing.assert_allclose(logits, whole[-1 - len(logits) : -1], **CLOSE)


@nnx.jit(static_argnums=2)
def _dense(model: ToyDecoder, token_ids: jax.Array, shared_layers: tuple[tuple[str, str], ...]) -> jax.Array:
    hidden = model(token_ids, jnp.arange(MAX_MODEL_LEN), DenseCache(dict(shared_layers)))
    return model.logits(hidden)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def serve_mixed(toy: Toy, budget: int) -> Server:
    """Requests that share prefixes and not, prefilled in chunks of `budget` tokens while others decode; all checked."""
    server, first = toy.server(), prompt(0, 29)
    server.run({"a": first}, 4, budget)
    prompts = {"b": first[:23] + prompt(1, 7), "c": prompt(2, 1), "d": first + prompt(3, 2), "e": prompt(4, 26)}
    hits = server.run(prompts, 8, budget)
    assert hits["b"] in (20, 16)
    assert hits["c"] == hits["e"] == 0
    assert hits["d"] in (28, 24)
    for name in ("a", *prompts):
        toy.check(server, name)
    return server
