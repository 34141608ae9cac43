"""Steps that verify drafts: what they accept, and that rejected drafts leave no trace in pages of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheConfig
from kvjax.device import (
    AttentionOptions,
    Bucket,
    Buckets,
    DeviceBatch,
    apply_delta_rule,
    convolve_states,
    create_pages,
    make_update_step,
)
from kvjax.device.steps.draft_check import accept_drafts
from kvjax.planning import plan_kv_cache
from tests.device.drafting import DraftingServer, greedy
from tests.device.layers import test_compressed_attention as compressed
from tests.device.layers import test_recurrent as recurrent
from tests.device.serving import Server
from tests.device.toy import BLOCK_SIZE, ToyModel, toy_config
from tests.device.toy_kinds import HASH_BLOCK, HIDDEN, VOCAB, KVLayer, ToyDecoder, linear, random_decoder

NUM_DRAFTS = 3
BUCKETS = Buckets((Bucket(48, 4, 16),))
DRAFTING = Buckets((Bucket(48, 4, 16, num_drafts=NUM_DRAFTS),))
CLOSE = {"atol": 5e-5, "rtol": 1e-4}
HEADS, KEY, VALUE, TAPS, STATE_BLOCK = 4, 6, 5, 4, 8


class DeltaLayer(nnx.Module):
    """A convolution and the gated delta rule."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name, self.inputs = name, linear(HIDDEN, HEADS * (2 * KEY + VALUE), rngs)
        self.gates, self.out = linear(HIDDEN, 2 * HEADS, rngs), linear(HEADS * VALUE, HIDDEN, rngs)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (HEADS * (2 * KEY + VALUE), TAPS)))

    def __call__(self, x: jax.Array, positions: jax.Array, cache) -> jax.Array:
        mixed = convolve_states(cache, self.name, self.inputs(x), self.kernel[...])
        q, k, v = jnp.split(mixed.reshape(x.shape[0], HEADS, -1), [KEY, 2 * KEY], axis=-1)
        g, beta = jnp.split(self.gates(x), 2, axis=-1)
        out = apply_delta_rule(cache, self.name, q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta))
        return self.out(out.reshape(x.shape[0], -1))


def delta_config(mode: str, drafts: int) -> KVCacheConfig:
    shapes = ((HEADS * (2 * KEY + VALUE), TAPS - 1), (HEADS, KEY, VALUE))
    options = {"mamba_cache_mode": mode, "num_speculative_blocks": drafts}
    specs = {
        "layers.0": MambaSpec(block_size=STATE_BLOCK, shapes=shapes, dtypes=("float32",) * 2, **options),
        "layers.1": FullAttentionSpec(block_size=HASH_BLOCK, num_kv_heads=4, head_size=8, dtype="float32"),
    }
    return plan_kv_cache(specs, num_blocks=[600, 600], max_model_len=64, max_in_flight_tokens=48).config


def delta_model() -> ToyDecoder:
    def layers(rngs: nnx.Rngs) -> list[nnx.Module]:
        return [DeltaLayer("layers.0", rngs), KVLayer("layers.1", rngs, AttentionOptions(sm_scale=0.35))]

    return random_decoder(layers)


@dataclass(frozen=True)
class Case:
    """A model and its configs: with states for drafts, and without."""

    model: nnx.Module
    drafting: KVCacheConfig
    plain: KVCacheConfig
    buckets: Buckets = BUCKETS  # without drafts; those of other tests, where they have compiled the same step
    max_model_len: int = 40


def make_case(name: str) -> Case:
    if name == "attention":
        model, config = ToyModel(num_layers=2), toy_config(num_layers=2)
        return Case(model, config, config)
    if name == "compressed":
        toy = compressed.toy("cpu")
        return Case(toy.model, toy.config, toy.config, toy.step.buckets)
    kind, mode = name.split("_")
    if kind == "mamba":
        configs = [recurrent.hybrid_config(mode, drafts) for drafts in (NUM_DRAFTS, 0)]
        return Case(recurrent.random_model(), *configs, recurrent.BUCKETS)
    return Case(delta_model(), *(delta_config(mode, drafts) for drafts in (NUM_DRAFTS, 0)))


def prompts_of(seed: int) -> dict[str, list[int]]:
    """Two that begin alike, one of a token, one within a block."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, VOCAB, 17).tolist()
    return {
        "a": first,
        "b": first[:13] + rng.integers(0, VOCAB, 3).tolist(),
        "c": [int(rng.integers(VOCAB))],
        "d": [4, 2, 7],
    }


@pytest.mark.parametrize("name", ["attention", "compressed", "mamba_align", "mamba_none", "delta_align", "delta_none"])
def test_logits_after_rollback_equal_those_without_drafts(name: str) -> None:
    """Tokens and the logits that they were drawn from, with hits and preemption, over pages of NaN.

    Windows, entries of several tokens and their compressors, Mamba 1 and 2, gated delta nets, convolutions.
    """
    case, prompts = make_case(name), prompts_of(0)
    plain = Server(make_update_step(case.model, case.plain, case.buckets), BLOCK_SIZE, case.max_model_len)
    plain.run(prompts, 16, budget=48)
    answers = {name: plain.tokens[name][len(prompt) :] for name, prompt in prompts.items()}
    step = make_update_step(
        case.model,
        case.drafting,
        DRAFTING,
        sample_fn=greedy,
        return_logits=True,
        num_previous=DRAFTING.max_num_requests * (1 + NUM_DRAFTS),
    )
    for seed in range(2):
        server = DraftingServer(step, case.drafting, BLOCK_SIZE, case.max_model_len, seed)
        server.run(prompts, answers)
        for request, logits in server.logits.items():
            np.testing.assert_allclose(logits, plain.logits[request], **CLOSE)
        assert min(server.num_accepted, server.num_rejected) > 3
        assert server.num_hit or name.endswith("none")
    assert step.num_compiled == 1


# -- acceptance


@pytest.mark.parametrize("seed", range(20))
def test_accepts_the_longest_prefix_of_drafts_that_is_sampled(seed: int) -> None:
    """Against plain Python, request by request; padding rows accept nothing."""
    rng = np.random.default_rng(seed)
    num_requests, most = int(rng.integers(0, 6)), int(rng.integers(1, 5))
    counts = rng.integers(0, most + 1, num_requests)
    starts = np.concatenate([[0], np.cumsum(1 + counts)])
    num_rows = 6 * (1 + most)
    tokens, drafts = rng.integers(0, 2, (2, num_rows)).astype(np.int32)
    padded = np.full(7, starts[-1], np.int32)
    padded[: starts.size] = starts
    newest, num_accepted = accept_drafts(jnp.asarray(drafts), jnp.asarray(tokens), jnp.asarray(padded), most)
    expected = []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=False):
        accepted = 0
        while accepted < count and drafts[start + accepted + 1] == tokens[start + accepted]:
            accepted += 1
        expected.append((int(tokens[start + accepted]), accepted))
    expected += [(0, 0)] * (6 - num_requests)
    assert list(zip(newest.tolist(), num_accepted.tolist(), strict=True)) == expected


# -- shapes


def test_buckets_without_drafts_are_the_programs_that_they_were() -> None:
    """No rows of logits more, and no output but those of the sampler; `tokens` is what is sampled."""
    model, config = ToyModel(num_layers=2), toy_config(num_layers=2)
    steps = [
        make_update_step(model, config, Buckets((Bucket(8, 4, 4),)), sample_fn=greedy, num_previous=n)
        for n in (None, 9)
    ]
    outputs = [step.run(create_pages(config), DeviceBatch.empty(step.buckets.steps[0], 2)) for step in steps]
    for output, length in zip(outputs, (4, 9), strict=True):
        assert output.tokens is output.sampled
        assert output.sampled.shape == output.num_accepted.shape == (length,)
        assert not output.num_accepted.any()


def test_refuses_buckets_with_more_drafts_than_states_and_too_few_previous_tokens() -> None:
    model, config = ToyModel(num_layers=2), toy_config(num_layers=2)
    with pytest.raises(
        ValueError, match=r"group \d: expected states for 3 drafts \(num_speculative_blocks\), .* got 2"
    ):
        make_update_step(recurrent.random_model(), recurrent.hybrid_config(drafts=2), DRAFTING)
    with pytest.raises(ValueError, match="expected num_previous >= 4, got 3"):
        make_update_step(model, config, DRAFTING, num_previous=3)
