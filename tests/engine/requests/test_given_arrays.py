"""Arrays that callers give to an engine, or get from it, are theirs: what they write there later changes no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.engine import AsyncLLMEngine, GenerationResult, LLMEngine, RequestOutput, SamplingParams
from tests.engine.requests.input_engines import InputRequest, assert_greedy, make_engine
from tests.engine.requests.test_encoder_inputs import features_of
from tests.engine.requests.test_encoder_inputs import request_of as encoder_request
from tests.engine.requests.test_vector_inputs import request_of as vector_request
from tests.engine.requests.test_vector_inputs import vectors
from tests.spoiled_arrays import aligned, spoil

KINDS = ("encoder", "vectors", "mrope")
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 20))]


def random_request(rng: np.random.Generator, kind: str) -> InputRequest:
    """Few prompts and inputs, so that some are hits of others."""
    tokens = [rng.integers(0, 30, count).tolist() for count in rng.integers(1, 6, 2)]
    if kind == "encoder":
        return encoder_request([1, 2, 3, 4, 5, *tokens[0]], features_of(int(rng.integers(2))))
    return vector_request(kind, [[1, 2, 3], vectors(int(rng.integers(2)), 6), tokens[1]])


def given(request: InputRequest) -> dict[str, Any]:
    """What `add_request` takes of it, in arrays of the caller's."""
    inputs = dict(request.given)
    for name in inputs.keys() & {"encoder_features", "prompt_positions"}:
        inputs[name] = aligned(inputs[name])
    if "embeddings" in inputs:
        inputs["embeddings"] = [replace(one, embeds=aligned(one.embeds)) for one in inputs["embeddings"]]
    return inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_and_inputs_are_what_they_were_when_they_were_given(kind: str, seed: int) -> None:
    """Before a step reads them, and again for later requests, whose hits go by hashes of what was given."""
    rng = np.random.default_rng(seed)
    engine = make_engine(kind, async_scheduling=bool(seed % 2))
    requests: dict[str, InputRequest] = {}
    results: dict[str, GenerationResult] = {}
    for _ in range(3):
        for _ in range(3):
            request = random_request(rng, kind)
            prompt, inputs = aligned(request.prompt), given(request)
            params = SamplingParams(max_tokens=6, temperature=0.0)
            requests[engine.add_request(prompt, params, **inputs)] = request
            spoil(prompt, inputs)
        while engine.has_work:
            outputs = engine.step()
            for result in outputs.results.values():
                results[result.request_id] = replace(result, output_token_ids=result.output_token_ids.copy())
                spoil(result)
            spoil(outputs)
            engine.check_invariants()
    for request_id, request in requests.items():
        assert_greedy(kind, request, results[request_id])


@pytest.mark.parametrize("kind", KINDS)
def test_an_asynchronous_engine_takes_arrays_as_they_are_at_the_call(kind: str) -> None:
    """Not when a task begins, a first token is asked for, or the engine's thread comes to them."""

    async def collected(outputs: AsyncGenerator[RequestOutput]) -> list[GenerationResult]:
        return [output.result async for output in outputs if output.result is not None]

    async def generate(engine: LLMEngine, requests: list[InputRequest]) -> list[list[GenerationResult]]:
        async with AsyncLLMEngine(engine) as front:
            waiting = []
            for i, request in enumerate(requests):
                prompt, inputs = aligned(request.prompt), given(request)
                params = SamplingParams(max_tokens=6, temperature=0.0)
                if i % 2:
                    waiting.append(front.complete(prompt, params, **inputs))
                else:
                    waiting.append(collected(front.generate(prompt, params, **inputs)))
                spoil(prompt, inputs)
            return list(await asyncio.gather(*waiting))

    rng = np.random.default_rng(0)
    requests = [random_request(rng, kind) for _ in range(8)]
    results = asyncio.run(asyncio.wait_for(generate(make_engine(kind), requests), 60))
    for request, (result,) in zip(requests, results, strict=True):
        assert_greedy(kind, request, result)
