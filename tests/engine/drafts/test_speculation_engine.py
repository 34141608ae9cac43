"""Speculation in the whole engine: what a request asks of the sampler, its text, stream and results stay as they are.

A drafter that knows what an engine without speculation wrote tells it up to a random place, and something else there.
So every row of logits is looked at, and penalties, biases and log-probabilities of each must be those of its own place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvjax.core import RequestTable
from kvjax.engine import GenerationResult, LLMEngine, SamplingParams, SpeculativeConfig
from kvjax.engine.front import llm_engine
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.speculation import Drafts
from tests.engine.engines import FEW_BLOCKS, assert_no_leak, base_config, golden_prompts, loaded, make_engine
from tests.engine.sampling.test_sampling_requests import Digits

NAME = "llama"
NUM_DRAFTS = 3
NUM_TOKENS = 24
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logprobs": 3},
    {"temperature": 0.9, "frequency_penalty": 2.0, "min_p": 0.02, "logprobs": 2},
    {"temperature": 0.8, "n": 3, "presence_penalty": 1.0},
    {"temperature": 0.7, "logit_bias": {5: 8.0, 6: 7.5, 7: 7.0}, "repetition_penalty": 1.2, "top_k": 30},
    {"temperature": 1.2, "top_p": 0.9, "stop_token_ids": tuple(range(0, 256, 9)), "min_tokens": 5},
    {"temperature": 2.0, "n": 2, "token_matcher": Digits, "stop_token_ids": (2,)},
)
MATCHED = ("r6", "r6.1")


class KnowingDrafter:
    """Tells the right tokens up to a random place, where a wrong one stands."""

    device_tokens = None

    def __init__(self, table: RequestTable, answers: Mapping[str, np.ndarray], seed: int) -> None:
        self.num_accepted = self.num_rejected = 0
        self._table = table
        self._answers = answers
        self._rng = np.random.default_rng(seed)

    def start(self, request: EngineRequest) -> None:
        pass

    def stop(self, request: EngineRequest) -> None:
        pass

    def count(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return self._rng.integers(0, limits + 1)

    def propose(self, rows: np.ndarray, counts: np.ndarray, sampling: SamplingTable) -> Drafts:
        token_ids = np.zeros((rows.size, NUM_DRAFTS), np.int32)
        for i in np.flatnonzero(counts).tolist():
            row = rows.item(i)
            begin = int(self._table.num_tokens[row] - self._table.num_prompt_tokens[row])
            told = self._answers[self._table.request_ids[row]][begin : begin + NUM_DRAFTS]
            token_ids[i, : told.size] = told
            if self._rng.random() < 0.6:
                token_ids[i, self._rng.integers(NUM_DRAFTS)] ^= 1
        return Drafts(token_ids)

    def settle(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        self.num_accepted += int(num_accepted.sum())
        self.num_rejected += int((num_drafts - num_accepted).sum())


@functools.cache
def plain_engine() -> LLMEngine:
    return LLMEngine(loaded(NAME), base_config(NAME, max_logprobs=3))


@functools.cache
def base_speculating_engine(num_blocks: int) -> LLMEngine:
    """Holds the compiled step; runs nothing itself."""
    speculative = SpeculativeConfig(num_drafts=NUM_DRAFTS)
    return LLMEngine(loaded(NAME), base_config(NAME, num_blocks=num_blocks, speculative=speculative, max_logprobs=3))


def speculating_engine(answers: Mapping[str, np.ndarray] | None = None, **settings: Any) -> LLMEngine:
    """An engine whose drafter knows `answers` by request id, or looks prompts up."""
    settings = {"speculative": SpeculativeConfig(num_drafts=NUM_DRAFTS), "max_logprobs": 3, **settings}
    config = base_config(NAME, **settings)
    assert config.num_blocks is not None
    like = base_speculating_engine(config.num_blocks)
    if answers is None:
        return LLMEngine(loaded(NAME), config, like=like)
    make = functools.partial(KnowingDrafter, answers=answers, seed=0)
    with mock.patch.object(llm_engine, "PromptLookup", lambda table, *_: make(table)):
        return LLMEngine(loaded(NAME), config, like=like)


def prompts() -> list[np.ndarray]:
    golden = golden_prompts(NAME)
    return [golden[i % len(golden)] for i in range(len(PARAMS))]


def run(engine: LLMEngine) -> dict[str, GenerationResult]:
    for i, prompt in enumerate(prompts()):
        engine.add_request(prompt, SamplingParams(max_tokens=NUM_TOKENS, seed=i, **PARAMS[i]), request_id=f"r{i}")
    results: dict[str, GenerationResult] = {}
    while engine.num_unfinished or engine._runner.num_in_flight:
        results |= {result.request_id: result for result in engine.step().results.values()}
    assert_no_leak(engine)
    return results


@functools.cache
def plain_results() -> dict[str, GenerationResult]:
    return run(plain_engine())


def assert_same(results: Mapping[str, GenerationResult]) -> None:
    expected = plain_results()
    assert results.keys() == expected.keys()
    for name, result in results.items():
        plain = expected[name]
        np.testing.assert_array_equal(result.output_token_ids, plain.output_token_ids, err_msg=name)
        assert (result.finish_reason, result.text) == (plain.finish_reason, plain.text)
        np.testing.assert_allclose(result.logprobs, plain.logprobs, atol=1e-3)
        assert (result.prompt_logprobs is None) == (plain.prompt_logprobs is None)
        if result.prompt_logprobs is not None and plain.prompt_logprobs is not None:
            np.testing.assert_allclose(result.prompt_logprobs.logprobs, plain.prompt_logprobs.logprobs, atol=1e-3)
        assert (result.top_logprobs is None) == (plain.top_logprobs is None)
        if result.top_logprobs is not None and plain.top_logprobs is not None:
            np.testing.assert_array_equal(result.top_logprobs.token_ids, plain.top_logprobs.token_ids)
            np.testing.assert_allclose(result.top_logprobs.logprobs, plain.top_logprobs.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"max_num_seqs": 2, "max_num_batched_tokens": 9},
        {"num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16, "async_scheduling": True},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_every_row_of_logits_is_treated_as_its_place_asks(settings: dict[str, Any]) -> None:
    answers = {name: result.output_token_ids for name, result in plain_results().items()}
    engine = speculating_engine(answers, **settings)
    assert_same(run(engine))
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, KnowingDrafter)
    assert drafter.num_accepted > 20
    assert drafter.num_rejected > 10


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_lookup_changes_nothing(async_scheduling: bool) -> None:
    """The second run hits what the first has cached, drafts' blocks included."""
    engine = speculating_engine(async_scheduling=async_scheduling)
    assert_same(run(engine))
    assert_same(run(engine))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_on_the_device_count_for_penalties(async_scheduling: bool) -> None:
    """The model drafts for itself. It knows no penalties, so their requests accept some drafts and reject others."""
    config = base_config(
        NAME,
        speculative=SpeculativeConfig(method="draft_model", num_drafts=NUM_DRAFTS),
        max_logprobs=3,
        async_scheduling=async_scheduling,
    )
    like = base_speculating_engine(config.num_blocks or 0)
    engine = LLMEngine(loaded(NAME), config, draft_model=loaded(NAME), like=like)
    assert_same(results := run(engine))
    with_penalties = [results[name].stats for name in ("r1", "r2", "r3", "r3.1", "r4")]
    assert sum(stats.num_accepted_tokens for stats in with_penalties) > 10
    assert all(stats.num_accepted_tokens < stats.num_draft_tokens for stats in with_penalties)


def test_requests_with_a_matcher_are_not_drafted_for() -> None:
    """What it allows at a token is known once it has seen those before."""
    answers = {name: result.output_token_ids for name, result in plain_results().items()}
    results = run(speculating_engine(answers))
    assert [results[name].stats.num_draft_tokens for name in MATCHED] == [0, 0]
    assert all(result.stats.num_draft_tokens for name, result in results.items() if name not in MATCHED)


def test_statistics_tell_what_drafts_have_saved() -> None:
    """A token of a request costs a step, unless it was an accepted draft."""
    answers = {name: result.output_token_ids for name, result in plain_results().items()}
    engine = speculating_engine(answers)
    stats = {name: result.stats for name, result in run(engine).items()}
    steps = list(engine.step_stats)
    assert sum(step.num_accepted_tokens for step in steps) == sum(one.num_accepted_tokens for one in stats.values()) > 0
    assert sum(step.num_draft_tokens for step in steps) == sum(one.num_draft_tokens for one in stats.values())
    assert sum(step.num_sampled_tokens for step in steps) == sum(one.num_output_tokens for one in stats.values())
    assert len(steps) < len(plain_engine().step_stats)


def test_a_stream_brings_each_token_in_order() -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    engine = speculating_engine()
    prompt = golden_prompts(NAME)[0]
    outputs = list(engine.stream([prompt], params))
    result = outputs[-1].result
    assert result is not None
    assert [output.token_id for output in outputs] == result.output_token_ids.tolist()
    assert [output.logprob for output in outputs] == list(result.logprobs)
    np.testing.assert_array_equal(result.output_token_ids, plain_results()["r0"].output_token_ids)
    assert all(output.result is None for output in outputs[:-1])


def test_text_comes_in_order_and_ends_at_stop_strings() -> None:
    """Several tokens of a step complete the text that they complete one by one; what is behind a stop string is cut."""
    prompt = golden_prompts("demo")[0]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, stream_text=True),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, stream_text=True, stop=("e ", "is")),  # within a few
    ]
    expected = make_engine("demo").generate([prompt] * 2, params)
    answers = {f"request-{i}": expected[0].output_token_ids for i in range(2)}
    config = base_config("demo", speculative=SpeculativeConfig(num_drafts=NUM_DRAFTS))
    with mock.patch.object(llm_engine, "PromptLookup", lambda table, *_: KnowingDrafter(table, answers, seed=1)):
        engine = LLMEngine(loaded("demo"), config)
    texts = dict.fromkeys([engine.add_request(prompt, one) for one in params], "")
    results: dict[str, GenerationResult] = {}
    while engine.num_unfinished:
        outputs = engine.step()
        for output in outputs:
            texts[output.request_id] += output.text or ""
        results |= {result.request_id: result for result in outputs.results.values()}
    for name, of_plain in zip(texts, expected, strict=True):
        assert texts[name] == results[name].text == of_plain.text
        np.testing.assert_array_equal(results[name].output_token_ids, of_plain.output_token_ids)
        assert results[name].finish_reason is of_plain.finish_reason
    assert sum(result.stats.num_accepted_tokens for result in results.values()) > 8
