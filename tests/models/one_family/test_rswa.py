"""R-SWA in a whole engine: a small Llama whose queries see the prompt and a window of the answer.

The oracle is attention in float64 over whole sequences, its mask written out; the engine's logprobs must be its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core import RSWASpec
from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams, SpeculativeConfig
from kvjax.models import DenseAttention, LoadedModel, ModelConfig, StreamingWindow, load_model
from tests.engine.engines import assert_no_leak
from tests.models.configs import llama_dict
from tests.models.golden_models import model_folder

WINDOW = 12
STREAMING = StreamingWindow(size=WINDOW, keeps_prompt=True)
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=400,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,  # prompts come in chunks
    max_buckets=1,
)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(model_folder("streaming_llm"), "float32", streaming=STREAMING)


@dataclasses.dataclass(frozen=True)
class PromptAndWindow:
    """Attention of one sequence: token q sees k <= q of the prompt, and of the answer those with q - k < window."""

    num_prompt: int
    window: int

    def __call__(self, layer_name: str, q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        out = np.zeros((*q.shape[:2], v.shape[2]))
        for t in range(len(q)):
            seen = [s for s in range(t + 1) if s < self.num_prompt or t - s < self.window]
            scores = options.sm_scale * np.einsum("hd,shd->hs", q[t], k[seen])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[t] = np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), v[seen])
        return jnp.asarray(out, jnp.float32)


def oracle_logprobs(model: LoadedModel, result: GenerationResult, window: int = WINDOW) -> np.ndarray:
    """float64[n] of the output's tokens, each by the tokens before it."""
    num_prompt = len(result.prompt_token_ids)
    tokens = jnp.asarray(np.concatenate([result.prompt_token_ids, result.output_token_ids])[:-1])
    hidden = model.module(tokens, jnp.arange(tokens.size), PromptAndWindow(num_prompt, window))
    logits = np.asarray(model.module.logits(hidden), np.float64)[num_prompt - 1 :]
    assert (logits.argmax(axis=1) == result.output_token_ids).all()
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(logprobs)), result.output_token_ids]


def assert_right(model: LoadedModel, results: Sequence[GenerationResult]) -> None:
    for result in results:
        assert len(result.output_token_ids) == GREEDY.max_tokens
        np.testing.assert_allclose(result.logprobs, oracle_logprobs(model, result), atol=2e-4, rtol=0)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Prefixes of one text, so that they share blocks, each with a token of its own behind."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 60, 80)
    return [np.append(text[: length - 1], i).astype(np.int32) for i, length in enumerate(lengths)]


def test_every_layer_keeps_the_prompt_and_a_window() -> None:
    config = ModelConfig.from_dict(llama_dict()).for_streaming(STREAMING)
    expected = RSWASpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32", rswa_window=WINDOW)
    assert set(config.kv_cache_specs().values()) == {expected}


def test_prompts_in_chunks_and_hits_of_prompts_and_answers(model: LoadedModel) -> None:
    """The second round's prompts go on from the first's; what is hit saw all before it, whoever computed it."""
    engine = LLMEngine(model, CONFIG)
    first = engine.generate(prompts_of([30, 5, 41, 17]), GREEDY)
    assert_right(model, first)
    longer = [np.concatenate([r.prompt_token_ids, r.output_token_ids, [7, 8]]).astype(np.int32) for r in first]
    again = engine.generate([*prompts_of([30, 41]), *(tokens[:70] for tokens in longer)], GREEDY)
    assert_right(model, again)
    hits = [result.stats.num_cached_tokens for result in again]
    assert hits[:2] == [28, 40]
    expected = [
        min((n + WINDOW) // 4 * 4, 69 // 4 * 4, len(tokens[:70]) - 1)
        for n, tokens in zip((30, 5, 41, 17), longer, strict=True)
    ]
    assert hits[2:] == [n // 4 * 4 for n in expected]
    assert_no_leak(engine)


def test_preempted_answers_are_computed_again_with_the_same_mask(model: LoadedModel) -> None:
    """A pool of 33 blocks: prompts of 30, 29, 41 and 17 tokens have 32, and the window of each 4."""
    engine = LLMEngine(model, dataclasses.replace(CONFIG, num_blocks=34))
    apart = [prompts_of([length], seed)[0] for seed, length in enumerate([30, 29, 41, 17])]
    results = engine.generate(apart, GREEDY)
    assert sum(result.stats.num_preemptions for result in results) > 0
    assert_right(model, results)
    assert_no_leak(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_see_what_tokens_see(model: LoadedModel, asynchronous: bool) -> None:
    config = dataclasses.replace(
        CONFIG,
        max_num_batched_tokens=32,
        async_scheduling=asynchronous,
        speculative=SpeculativeConfig(num_drafts=3, min_ngram=1),
    )
    engine = LLMEngine(model, config)
    results = engine.generate([np.tile(prompt[:9], 3) for prompt in prompts_of([20, 30, 40])], GREEDY)
    assert sum(result.stats.num_accepted_tokens for result in results) > 0
    assert_right(model, results)
    assert_no_leak(engine)


def test_a_long_answer_holds_a_constant_number_of_blocks(model: LoadedModel) -> None:
    """A prompt of 10 tokens has 3 blocks of 4, a window of 12 at most 4."""
    engine = LLMEngine(model, dataclasses.replace(CONFIG, max_num_seqs=1))
    engine.add_request(prompts_of([10])[0], SamplingParams(max_tokens=110, temperature=0.0))
    most = 0
    while engine.num_unfinished:
        engine.step()
        for request in engine.scheduler.running:
            [table] = engine.manager.get_block_ids(request.request_id)
            assert all(table[:3])
            most = max(most, sum(block != 0 for block in table))
    assert most <= 7


def test_another_window_is_noticed(model: LoadedModel) -> None:
    [result] = LLMEngine(model, CONFIG).generate(prompts_of([30]), GREEDY)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(result.logprobs, oracle_logprobs(model, result, WINDOW + 1), atol=2e-4, rtol=0)


def test_dense_attention_knows_no_prompts(model: LoadedModel) -> None:
    with pytest.raises(NotImplementedError, match="expected sees_prompt=False of dense attention"):
        model.module(jnp.arange(4), jnp.arange(4), DenseAttention())
