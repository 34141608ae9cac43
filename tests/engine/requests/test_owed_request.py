"""A request that another engine takes up, with the tokens made so far, ends as it would have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.engine import GenerationResult, LLMEngine, OwedRequest, SamplingParams
from tests.engine.engines import AMPLE_BLOCKS, golden_prompts, make_engine

PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "by chance": SamplingParams(max_tokens=24, seed=3, temperature=0.9, top_p=0.9, top_k=50),
    "unseeded": SamplingParams(max_tokens=24),
    "samples": SamplingParams(max_tokens=12, n=3),
    "penalties": SamplingParams(max_tokens=24, frequency_penalty=1.0, repetition_penalty=1.2, min_p=0.01, seed=1),
    "masks": SamplingParams(max_tokens=24, logit_bias={7: 3.0}, bad_token_ids=(1, 2), allowed_token_ids=(7, 8, 9)),
    "stops": SamplingParams(max_tokens=24, stop=("e", "zzz"), min_tokens=9, stop_token_ids=(5,), temperature=0.0),
    "best": SamplingParams(max_tokens=12, logprobs=2, temperature=0.0),
}


def new_engine() -> LLMEngine:
    return make_engine("demo", num_blocks=AMPLE_BLOCKS, max_num_seqs=8, max_num_batched_tokens=64)


def run(engine: LLMEngine, num_steps: int | None = None) -> dict[str, GenerationResult]:
    """What ends within so many steps; None: all."""
    results: dict[str, GenerationResult] = {}
    while engine.has_work and (num_steps is None or num_steps > 0):
        results |= {one.request_id: one for one in engine.step().results.values()}
        num_steps = None if num_steps is None else num_steps - 1
    return results


def add_all(engine: LLMEngine) -> None:
    prompts = golden_prompts("demo")
    for i, (name, params) in enumerate(PARAMS.items()):
        if name != "best":
            engine.add_request(prompts[i % len(prompts)], params, request_id=name, cache_salt="a", priority=i % 2)


def told(result: GenerationResult) -> tuple[Any, ...]:
    tokens = (result.prompt_token_ids.tolist(), result.output_token_ids.tolist())
    return (*tokens, result.finish_reason, result.text)


SWEEP = [pytest.param(num_steps, marks=pytest.mark.sweep) for num_steps in (1, 9, 25)]


@pytest.mark.parametrize("num_steps", [0, 3, 17, *SWEEP])
def test_a_request_that_is_taken_up_ends_as_it_would_have(num_steps: int) -> None:
    undisturbed, first, second = new_engine(), new_engine(), new_engine()
    add_all(undisturbed)
    expected = run(undisturbed)
    add_all(first)
    results = run(first, num_steps)
    owed = [OwedRequest.from_json(json.loads(json.dumps(one.to_json()))) for one in first.owed()]
    assert owed == first.owed()
    assert {one.request_id for one in owed} == expected.keys() - results.keys()
    for one in owed:
        second.take_up(one)
    results |= run(second)
    second.check_invariants()
    assert {name: told(one) for name, one in results.items()} == {name: told(one) for name, one in expected.items()}
    for name, one in results.items():
        assert np.allclose(one.logprobs, expected[name].logprobs, atol=1e-4)


def test_what_is_made_so_far_is_kept() -> None:
    engine = new_engine()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True), request_id="r")
    assert not run(engine, 4)
    (owed,) = engine.owed()
    assert len(owed.output_token_ids) == len(owed.logprobs) == 4
    other = new_engine()
    other.take_up(owed)
    assert len(other.step()) == 1
    (result,) = run(other).values()
    assert tuple(result.output_token_ids[:4].tolist()) == owed.output_token_ids
    assert result.output_token_ids.size == len(result.logprobs) == 9


@pytest.mark.parametrize("params", [PARAMS["best"], SamplingParams(prompt_logprobs=1)])
def test_one_that_asks_for_more_than_tokens_begins_anew(params: SamplingParams) -> None:
    assert OwedRequest(request_id="r", prompt_token_ids=(1,), params=params).begins_anew


def test_what_cannot_be_owed_is_refused() -> None:
    one = OwedRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="expected n=1, got 2"):
        replace(one, params=SamplingParams(n=2))
    with pytest.raises(ValueError, match="expected no token_matcher"):
        replace(one, params=SamplingParams(token_matcher=lambda: None))  # type: ignore[arg-type,return-value]
    for made in ((1,), ()), ((1, 2), (0.0, 0.0)):
        with pytest.raises(ValueError, match="expected fewer than 2 output tokens"):
            one.with_output(*made)
    engine = new_engine()
    with pytest.raises(ValueError, match="expected token ids below"):
        engine.take_up(one.with_output((10**6,), (0.0,)))
    assert not engine.has_work


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"nonsense": 1},
        {"request_id": "r", "prompt_token_ids": 3, "params": {}},
        {"request_id": "r", "prompt_token_ids": [3], "params": {"nonsense": 1}},
        {"request_id": "r", "prompt_token_ids": [3], "params": {"temperature": "hot"}},
        {"request_id": "r", "prompt_token_ids": [3], "params": {"logit_bias": 3}},
        {"request_id": "r", "prompt_token_ids": ["x"], "params": {}},
    ],
)
def test_only_owed_requests_are_read(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid"):
        OwedRequest.from_json(values)
