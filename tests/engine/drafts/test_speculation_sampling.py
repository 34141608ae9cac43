"""Speculation under sampling: the tokens of every seed are those without drafts, and so is their distribution.

The model has 8 tokens, so that the joint distribution of two tokens has few enough cells to be counted.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.engine import EngineConfig, LLMEngine, SamplingParams, SpeculativeConfig
from kvjax.models import DenseAttention, LoadedModel, build_model
from kvjax.models.config import ModelConfig
from tests.models.configs import llama_dict

VOCAB = 8
NUM_SEEDS = 1000
NUM_DRAFTS = 2
PROMPT = np.array([1, 2, 3, 1, 2, 3, 5, 1], np.int32)
HOW = {
    "temperature": SamplingParams(temperature=0.7, max_tokens=4),
    "top_p": SamplingParams(temperature=1.4, top_p=0.8, max_tokens=4),
    "top_k": SamplingParams(temperature=2.0, top_k=5, max_tokens=4),
}
METHODS = {
    "prompt_lookup": SpeculativeConfig(method="prompt_lookup", num_drafts=NUM_DRAFTS, max_ngram=2, min_ngram=1),
    "draft_model": SpeculativeConfig(method="draft_model", num_drafts=NUM_DRAFTS),
}


@functools.cache
def model(seed: int) -> LoadedModel:
    """A Llama of random weights."""
    config = ModelConfig.from_dict(llama_dict(vocab_size=VOCAB, num_hidden_layers=1))
    return LoadedModel(config, build_model(config, rngs=nnx.Rngs(seed)), None)


@functools.cache
def engine_of(method: str | None) -> LLMEngine:
    speculative = None if method is None else METHODS[method]
    config = EngineConfig(
        block_size=4,
        num_blocks=600,
        max_model_len=32,
        max_num_seqs=64,
        max_num_batched_tokens=192,
        max_buckets=1,
        watermark=0.0,
        max_logprobs=2,
        speculative=speculative,
    )
    if method == "draft_model":
        return LLMEngine(model(0), config, draft_model=model(1), like=engine_of("prompt_lookup"))
    return LLMEngine(model(0), config)


@functools.cache
def outputs(method: str | None, how: str) -> tuple[np.ndarray, int, int]:
    """int32[NUM_SEEDS, 4] what each seed gives; drafts, and those accepted."""
    engine = engine_of(method)
    params = [replace(HOW[how], seed=seed) for seed in range(NUM_SEEDS)]
    results = engine.generate([PROMPT] * NUM_SEEDS, params)
    tokens = np.stack([result.output_token_ids for result in results])
    engine.check_invariants()
    num_drafts = sum(result.stats.num_draft_tokens for result in results)
    return tokens, num_drafts, sum(result.stats.num_accepted_tokens for result in results)


@functools.cache
def logits_after(how: str) -> dict[tuple[int, ...], np.ndarray]:
    """float64[VOCAB] probabilities after the prompt and up to two tokens, by a dense pass over each sequence."""
    module = model(0).module
    forward = jax.jit(
        jax.vmap(lambda tokens: module.logits(module(tokens, jnp.arange(PROMPT.size + 2), DenseAttention())))
    )
    pairs = np.array(list(itertools.product(range(VOCAB), repeat=2)), np.int32)
    logits = np.asarray(forward(np.concatenate([np.tile(PROMPT, (len(pairs), 1)), pairs], axis=1)), np.float64)
    after: dict[tuple[int, ...], np.ndarray] = {}
    for (first, second), row in zip(pairs.tolist(), logits, strict=True):
        for place, prefix in ((1, ()), (2, (first,)), (3, (first, second))):
            after[prefix] = probabilities(row[PROMPT.size - 2 + place], HOW[how])
    return after


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What `params` make of logits, by the definitions of top-k and of the nucleus."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights)
    kept = order[: params.top_k or VOCAB]
    shares = weights[kept] / weights[kept].sum()
    kept = kept[np.cumsum(shares) - shares < params.top_p]
    out = np.zeros(VOCAB)
    out[kept] = weights[kept] / weights[kept].sum()
    return out


def critical_value(degrees: int) -> float:
    """The chi-squared quantile of 1 - 1e-4, by the approximation of Wilson and Hilferty (1931): off by under 1 %."""
    normal_quantile = 3.719  # of 1 - 1e-4
    share = 2 / (9 * degrees)
    return degrees * (1 - share + normal_quantile * share**0.5) ** 3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", METHODS)
def test_every_seed_gives_the_tokens_that_it_gives_without_drafts(method: str, how: str) -> None:
    plain, no_drafts, _ = outputs(None, how)
    drafted, num_drafts, num_accepted = outputs(method, how)
    assert no_drafts == 0
    assert num_drafts - num_accepted > NUM_SEEDS // 2  # many are wrong
    assert num_accepted > NUM_SEEDS // 10
    np.testing.assert_array_equal(drafted, plain)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", [None, *METHODS])
def test_the_distribution_of_two_tokens_is_the_models(method: str | None, how: str) -> None:
    """Pearson's chi-squared test over the pairs of second and third tokens, which drafts are verified for.

    Cells of fewer than 5 expected pairs count as one.
    """
    after = logits_after(how)
    expected = np.zeros((VOCAB, VOCAB))
    for first, second in itertools.product(range(VOCAB), repeat=2):
        expected[second] += after[()][first] * after[(first,)][second] * after[(first, second)]
    tokens, _, _ = outputs(method, how)
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, (tokens[:, 1], tokens[:, 2]), 1)
    expected = (expected * NUM_SEEDS).ravel()
    seen = seen.ravel()
    assert not seen[expected == 0].any()  # nothing beyond the top k and the nucleus
    large = expected >= 5
    cells = [(seen[large], expected[large])]
    if expected[~large].sum() > 0:
        cells.append((seen[~large].sum(keepdims=True), expected[~large].sum(keepdims=True)))
    observed, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert observed.size > 12
    assert statistic < critical_value(observed.size - 1)


@pytest.mark.parametrize("degrees", [10, 30, 50])
def test_the_critical_value_is_exceeded_once_in_ten_thousand(degrees: int) -> None:
    """The exact tail of an even number of degrees: exp(-x / 2) times the first degrees / 2 terms of exp(x / 2)."""
    half = critical_value(degrees) / 2
    tail = math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))
    assert tail == pytest.approx(1e-4, rel=0.2)


ASKING_MORE = {
    "presence_penalty": SamplingParams(temperature=1.0, max_tokens=10, presence_penalty=1.5),
    "frequency_penalty": SamplingParams(temperature=1.0, max_tokens=10, frequency_penalty=1.0),
    "repetition_penalty": SamplingParams(temperature=1.0, max_tokens=10, repetition_penalty=1.8),
    "min_p": SamplingParams(temperature=1.5, max_tokens=10, min_p=0.2),
    "logit_bias": SamplingParams(temperature=1.0, max_tokens=10, logit_bias={5: -3.0, 2: 2.0}),
    "logprobs": SamplingParams(temperature=1.0, max_tokens=10, logprobs=2),
    "stop": SamplingParams(temperature=1.0, max_tokens=10, stop_token_ids=(7, 1)),
}


@pytest.mark.parametrize("how", ASKING_MORE)
@pytest.mark.parametrize("method", METHODS)
def test_whatever_a_request_asks_of_its_tokens_drafts_change_none(method: str, how: str) -> None:
    """Penalties count the tokens before each, accepted drafts among them; log-probabilities are each token's own."""
    params = [replace(ASKING_MORE[how], seed=seed) for seed in range(60)]
    engines = engine_of(None), engine_of(method)
    plain, drafted = (engine.generate([PROMPT] * len(params), params) for engine in engines)
    assert sum(result.stats.num_accepted_tokens for result in drafted) > 10
    for one, other in zip(drafted, plain, strict=True):
        assert one.output_token_ids.tolist() == other.output_token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.finish_reason is other.finish_reason
        if how == "logprobs":
            assert one.top_logprobs is not None
            assert other.top_logprobs is not None
            np.testing.assert_array_equal(one.top_logprobs.token_ids, other.top_logprobs.token_ids)
            np.testing.assert_allclose(one.top_logprobs.logprobs, other.top_logprobs.logprobs, atol=1e-5)
