"""What requests ask of the sampler holds with drafts: one counts as output for the rows behind it, and no further."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvjax.engine import FinishReason, LLMEngine, SamplingParams, SpeculativeConfig
from tests.engine.engines import FEW_BLOCKS, assert_no_leak, base_config, golden_prompts, loaded
from tests.engine.sampling.test_sampling_requests import NAME, PARAMS, Digits, expected_best, naive_outputs, params_of

NUM_DRAFTS = 3
METHODS = {
    "prompt_lookup": SpeculativeConfig(method="prompt_lookup", num_drafts=NUM_DRAFTS, max_ngram=2, min_ngram=1),
    "draft_model": SpeculativeConfig(method="draft_model", num_drafts=NUM_DRAFTS),
}


@functools.cache
def first_engine(method: str, num_blocks: int) -> LLMEngine:
    """Holds the compiled steps. The model drafts for itself: it is right where nothing is asked of the sampler."""
    settings: dict[str, Any] = {"num_blocks": num_blocks, "speculative": METHODS[method], "max_logprobs": 3}
    draft_model = loaded(NAME) if method == "draft_model" else None
    return LLMEngine(loaded(NAME), base_config(NAME, **settings), draft_model=draft_model)


def make_engine(method: str, *, num_blocks: int = 600, **settings: Any) -> LLMEngine:
    like = first_engine(method, num_blocks)
    config = base_config(NAME, num_blocks=num_blocks, speculative=METHODS[method], max_logprobs=3, **settings)
    draft_model = loaded(NAME) if method == "draft_model" else None
    return LLMEngine(loaded(NAME), config, draft_model=draft_model, like=like)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True, "max_num_seqs": 3},
        {"num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 32, "async_scheduling": True},
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_are_those_of_a_naive_loop(method: str, settings: dict[str, Any]) -> None:
    engine, prompts = make_engine(method, **settings), golden_prompts(NAME)
    results = engine.generate(prompts[: len(PARAMS)], [params_of(i) for i in range(len(PARAMS))])
    for i, result in enumerate(results):
        assert result.output_token_ids.tolist() == naive_outputs()[i], PARAMS[i]
    assert sum(result.stats.num_draft_tokens for result in results) > 0
    assert sum(result.stats.num_accepted_tokens for result in results) > 0
    assert_no_leak(engine)


@pytest.mark.parametrize("method", METHODS)
def test_the_best_tokens_stand_with_the_tokens_of_several_a_step(method: str) -> None:
    engine = make_engine(method)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
    prompts = golden_prompts(NAME)
    results = engine.generate(prompts, params)
    for result, (tokens, logits) in zip(results, expected_best(), strict=True):
        assert result.output_token_ids.tolist() == tokens
        log = np.array(logits, np.float64)
        log -= np.log(np.exp(log).sum(axis=-1, keepdims=True))
        best = result.top_logprobs
        assert best is not None
        assert best.token_ids[:, 0].tolist() == tokens
        np.testing.assert_allclose(best.logprobs, np.sort(log, axis=-1)[:, :-4:-1], atol=1e-5)
    assert sum(result.stats.num_accepted_tokens for result in results) > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_is_followed_beside_requests_with_drafts(method: str, async_scheduling: bool) -> None:
    engine, prompts = make_engine(method, async_scheduling=async_scheduling), golden_prompts(NAME)
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    grammar = SamplingParams(max_tokens=8, seed=1, temperature=2.0, token_matcher=Digits, stop_token_ids=(2,))
    results = engine.generate(prompts, [plain, grammar] * 3)
    for result in results[1::2]:
        *digits, end = result.output_token_ids.tolist()
        assert (end, result.finish_reason) == (2, FinishReason.STOP)
        assert set(digits) <= set(range(48, 58))
        assert result.stats.num_draft_tokens == 0
    for result, (tokens, _) in zip(results[::2], expected_best()[::2], strict=True):
        assert result.output_token_ids.tolist() == tokens
    assert_no_leak(engine)
