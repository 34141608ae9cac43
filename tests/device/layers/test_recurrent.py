"""A small model of attention and Mamba layers, run by the manager's plans: states go on over steps and prefix hits."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheConfig
from kvjax.device import (
    Bucket,
    Buckets,
    DeviceBatch,
    RecurrentStep,
    StepCache,
    UpdateStep,
    create_pages,
    make_update_step,
)
from kvjax.device.pages.kv_pages import Column
from kvjax.planning import plan_kv_cache
from pallas_kernels.ssm_update import causal_conv1d, selective_scan
from tests.device.aliases import assert_in_place
from tests.device.serving import Server
from tests.device.toy import BLOCK_SIZE, HEAD_DIM, HIDDEN, KV_HEADS, VOCAB, ToyAttention
from tests.device.traces import at_most_traced

STATE_BLOCK = 8  # tokens between states that can be hit
HEADS, HEAD_CHANNELS, STATE_DIM, TAPS = 4, 3, 6, 4
CHANNELS = HEADS * HEAD_CHANNELS
SHAPES = {  # convolution and scan of Mamba 1 and 2
    1: ((CHANNELS, TAPS - 1), (CHANNELS, STATE_DIM)),
    2: ((CHANNELS + 2 * STATE_DIM, TAPS - 1), (HEADS, HEAD_CHANNELS, STATE_DIM)),
}
MAX_MODEL_LEN = 40
BUCKETS = Buckets((Bucket(48, 4, 10),))
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


class ToyMamba(nnx.Module):
    """Convolution, scan and gate; norms and the like left out."""

    def __init__(self, layer: int, version: int, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        (convolved, _), _ = SHAPES[version]
        self.name, self.version = f"layers.{layer}", version
        self.input, self.gate, self.out = linear(HIDDEN, convolved), linear(HIDDEN, CHANNELS), linear(CHANNELS, HIDDEN)
        per_head = CHANNELS if version == 1 else HEADS
        self.dt = linear(HIDDEN, per_head)
        self.bc = linear(CHANNELS, 2 * STATE_DIM)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (convolved, TAPS)) * 0.5)
        shape = (CHANNELS, STATE_DIM) if version == 1 else (HEADS,)
        self.a_log = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.d = nnx.Param(jax.random.normal(rngs.params(), (per_head,)))

    def __call__(self, hidden: jax.Array, cache: Any) -> jax.Array:
        def convolve(states: Column, step: RecurrentStep, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Column]:
            out, conv = causal_conv1d(x, states[0], weight, *step)
            return out, (conv,)

        def scan(states: Column, step: RecurrentStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
            x, dt, a, b, c, d = inputs
            out, scanned = selective_scan(x, states[0], dt, -jnp.exp(a), b, c, *step, d=d)
            return out, (scanned,)

        convolved = cache.update_states(
            self.name, convolve, (self.input(hidden), self.kernel[...]), (1, 0), arrays=(0,)
        )
        x, b, c = self.split(convolved)
        inputs = (x, self.dt(hidden), self.a_log[...], b, c, self.d[...])
        y = cache.update_states(self.name, scan, inputs, (1, 1, 0, None, None, 0), arrays=(1,))
        return self.out(y.reshape(-1, CHANNELS) * jax.nn.silu(self.gate(hidden)))

    def split(self, convolved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x, b and c: Mamba 1 makes b and c of the convolved x, Mamba 2 convolves them beside it."""
        if self.version == 1:
            return convolved, *jnp.split(self.bc(convolved), 2, axis=-1)
        x, b, c = jnp.split(convolved, [CHANNELS, CHANNELS + STATE_DIM], axis=-1)
        return x.reshape(-1, HEADS, HEAD_CHANNELS), b[:, None], c[:, None]


class ToyHybrid(nnx.Module):
    """Mamba 1, full attention, Mamba 2."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List([ToyMamba(0, 1, rngs), ToyAttention(1, KV_HEADS, rngs), ToyMamba(2, 2, rngs)])
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        x = self.embed(token_ids)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x, cache))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head(hidden) * 3.0


def random_model() -> ToyHybrid:
    """With weights drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(ToyHybrid))
    weights = jax.tree.map(lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape), x.dtype), state)
    return nnx.merge(graphdef, weights)


def hybrid_config(mode: str = "align", drafts: int = 0) -> KVCacheConfig:
    """Planned: states in a pool of their own, both layers in one table."""
    sizes = {"num_kv_heads": KV_HEADS, "head_size": HEAD_DIM, "dtype": "float32"}
    specs: dict[str, Any] = {"layers.1": FullAttentionSpec(block_size=BLOCK_SIZE, **sizes)}
    for layer, version in ((0, 1), (2, 2)):
        state = {"shapes": SHAPES[version], "dtypes": ("float32",) * 2, "mamba_cache_mode": mode}
        specs[f"layers.{layer}"] = MambaSpec(block_size=STATE_BLOCK, num_speculative_blocks=drafts, **state)
    plan = plan_kv_cache(specs, num_blocks=[600, 3000], max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=48)
    return plan.config


def serve(step: UpdateStep, mode: str = "align") -> Server:
    return Server(step, BLOCK_SIZE, MAX_MODEL_LEN, hybrid_config(mode))


@pytest.fixture(scope="module")
def step() -> UpdateStep:
    return make_update_step(random_model(), hybrid_config(), BUCKETS)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def recomputed(step: UpdateStep, tokens: list[int], num_tokens: int) -> np.ndarray:
    """Logits of `num_tokens` greedy tokens, each from the whole sequence in one step over fresh pages."""
    found = []
    for _ in range(num_tokens):
        server = serve(step)
        server.run({"whole": tokens}, 1, budget=48)
        assert len(server.plans) <= 2  # up to the last state that can be hit, and the rest
        found.append(server.logits["whole"][0])
        tokens = [*tokens, int(found[-1].argmax())]
    return np.array(found)


def test_a_prefix_hit_continues_from_the_cached_state(step: UpdateStep) -> None:
    """It reads the page that an earlier request left, writes another, and computes what a fresh cache computes."""
    server, first = serve(step), prompt(0, 22)
    assert server.run({"a": first}, 3) == {"a": 0}
    state_group = next(i for i, group in enumerate(server.config.kv_cache_groups) if "layers.0" in group.layer_names)
    pool_id = server.config.kv_cache_groups[state_group].pool_id
    left = jax.tree.map(np.array, server.pages.pools[pool_id])
    before = len(server.plans)
    tokens = first[:18] + prompt(1, 5)
    assert server.run({"b": tokens}, 9) == {"b": 16}
    plan = server.plans[before].groups[state_group]
    (read,), (write,) = plan.state_read.tolist(), plan.state_write.tolist()
    assert plan.has_initial_state.all()
    assert read != write
    after = jax.tree.map(np.array, server.pages.pools[pool_id])
    chex.assert_trees_all_equal(*(jax.tree.map(lambda leaf: leaf[read], pool) for pool in (after, left)), strict=True)
    for old, new in zip(jax.tree.leaves(left), jax.tree.leaves(after), strict=True):
        assert not np.array_equal(new[write], old[write], equal_nan=True)
    np.testing.assert_allclose(server.logits["b"], recomputed(step, tokens, 9), **CLOSE)


@pytest.mark.parametrize("budget", [48, 8, 9])
def test_requests_of_one_step_keep_their_states_apart(step: UpdateStep, budget: int) -> None:
    """Decoding, prefilling, and two that continue from one cached state, in steps of any size."""
    server, shared = serve(step), prompt(2, 17)
    server.run({"a": shared}, 1)
    prompts = {"b": shared + prompt(3, 9), "c": prompt(4, 1), "d": shared + prompt(5, 2), "e": prompt(6, 20)}
    assert server.run(prompts, 4, budget) == {"b": 16, "c": 0, "d": 16, "e": 0}
    for name, tokens in prompts.items():
        np.testing.assert_allclose(server.logits[name], recomputed(step, tokens, 4), **CLOSE)


def test_without_cached_states_every_request_computes_its_own(step: UpdateStep) -> None:
    """Mode none: one state a request for its life, no hits, and the same logits."""
    server, tokens = serve(step, "none"), prompt(0, 22)
    for name in ("a", "b"):
        assert server.run({name: tokens}, 3, budget=7) == {name: 0}
        np.testing.assert_allclose(server.logits[name], recomputed(step, tokens, 3), **CLOSE)


def test_the_compiled_step_updates_states_in_place_and_is_traced_once(step: UpdateStep) -> None:
    pages = create_pages(hybrid_config())
    assert_in_place(step.compiled(pages, BUCKETS.steps[0]), pages)
    pages = step.warmup(pages)
    assert not any(leaf.any() for leaf in jax.tree.leaves(pages)), "an empty batch writes nothing"
    num_compiled = step.num_compiled
    with at_most_traced(ToyHybrid, 0):
        serve(step).run({"a": prompt(0, 22)}, 3)
    assert step.num_compiled == num_compiled


def empty_cache() -> StepCache:
    config = hybrid_config()
    recurrent = {i: 0 for i, group in enumerate(config.kv_cache_groups) if "layers.0" in group.layer_names}
    return StepCache(create_pages(config), DeviceBatch.empty(Bucket(4, 2, 2), 2, recurrent=recurrent), config)


def test_refuses_what_is_no_recurrent_layer_or_other_states() -> None:
    def keep(states: tuple[jax.Array, ...], step: RecurrentStep) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return step.state_read, states

    cache = empty_cache()
    with pytest.raises(NotImplementedError, match=r"layer 'layers.1': expected a cache of states, got full"):
        cache.update_states("layers.1", keep)
    with pytest.raises(ValueError, match=r"expected a layer out of .*, got 'layers.9'"):
        cache.update_states("layers.9", keep)
    with pytest.raises(ValueError, match=r"layer 'layers.0': expected states \[.*\] back, got \[.*\]"):
        cache.update_states("layers.0", lambda states, step: (step.state_read, states[:1]))
    assert cache.update_states("layers.0", keep).shape == (2,)
    with pytest.raises(ValueError, match=r"layer 'layers.0' attends twice in one step"):
        cache.update_states("layers.0", keep)
    assert set(cache.unused_layers) == {"layers.1", "layers.2"}


def test_a_layer_has_run_when_each_of_its_arrays_is_updated_once() -> None:
    def keep(states: Column, step: RecurrentStep) -> tuple[jax.Array, Column]:
        return step.state_read, states

    cache = empty_cache()
    for arrays in ((), (2,), (0, 0)):
        with pytest.raises(ValueError, match=r"layer 'layers.0': expected distinct arrays out of 2, got \(.*\)"):
            cache.update_states("layers.0", keep, arrays=arrays)
    with pytest.raises(ValueError, match=r"expected a head dimension or None for each of 1 inputs, got 0"):
        cache.update_states("layers.0", keep, (jnp.zeros(2),))
    cache.update_states("layers.0", keep, arrays=(1,))
    assert "layers.0" in cache.unused_layers
    with pytest.raises(ValueError, match=r"layer 'layers.0' updates arrays \[1\] of its states twice in one step"):
        cache.update_states("layers.0", keep)
    cache.update_states("layers.0", keep, arrays=(0,))
    assert "layers.0" not in cache.unused_layers
