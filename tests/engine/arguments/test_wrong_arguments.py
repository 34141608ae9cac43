"""Whatever a caller gives, it is a ValueError at the call or a request that ends well, and no other request notices."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, LoRARequest, Request
from kvjax.core.hashing.extra_keys import MultiModalFeature
from kvjax.engine import AsyncLLMEngine, FinishReason, LLMEngine, SamplingParams
from kvjax.engine.requests.request_inputs import MultimodalInput
from tests.engine.arguments.wrong_values import WRONG_VALUES
from tests.engine.engines import assert_no_leak, base_config, golden_prompts, loaded
from tests.engine.requests import input_engines

NAME = "llama"
GOOD = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
ANYTHING = ("prompt_logprobs", "skip_reading_prefix_cache", "skip_writing_prefix_cache")  # whether it is true, or there
INPUTS = [name for name in inspect.signature(LLMEngine.add_request).parameters if name not in ("self", "params")]


def values() -> list[Any]:
    """Each with its own iterators."""
    return [iter([1]) if type(value) is type(iter([])) else value for value in WRONG_VALUES]


@functools.cache
def engine() -> LLMEngine:
    return LLMEngine(loaded(NAME), base_config(NAME, async_scheduling=True, max_logprobs=3))


@functools.cache
def expected() -> list[list[int]]:
    return [one.output_token_ids.tolist() for one in engine().generate(golden_prompts(NAME)[:2], GOOD)]


def assert_are_clear(refusals: list[str], least: int = 20) -> None:
    """Short, and most say what was expected: the others are numpy's, of arrays where True or False was."""
    assert len(refusals) >= least
    assert all(len(one) < 1_000 for one in refusals)
    assert sum("expected" not in one for one in refusals) <= 6


def assert_others_are_untouched(queued: list[str], own: LLMEngine) -> None:
    """Runs what is queued beside two good requests."""
    good = [own.add_request(prompt, GOOD, priority=1) for prompt in golden_prompts(NAME)[:2]]
    results = {}
    while own.has_work:
        results |= {one.request_id: one for one in own.step().results.values()}
    assert [results[name].output_token_ids.tolist() for name in good] == expected()
    assert set(queued) <= set(results)
    assert_no_leak(own)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_sampling_params(name: str) -> None:
    own, queued, refusals = engine(), [], []
    expected()
    for value in values():
        settings = {"max_tokens": 3, name: value}
        try:
            params = SamplingParams(**settings)
            queued.append(own.add_request([1, 2, 3], params))
        except ValueError as error:
            refusals.append(str(error))
        else:
            hash(params)
    assert_are_clear(refusals)
    assert_others_are_untouched(queued, own)


@pytest.mark.parametrize("name", [*INPUTS, "params"])
def test_inputs_of_a_prompt(name: str) -> None:
    own, queued, refusals = engine(), [], []
    expected()
    for value in values():
        given = {"prompt": [1, 2, 3], "params": SamplingParams(max_tokens=2), name: value}
        for check in (own.check_request, own.add_request):
            try:
                queued.append(check(**copy.copy(given)))
            except ValueError as error:
                refusals.append(str(error))
    assert_are_clear(refusals)
    assert_others_are_untouched([one for one in queued if one is not None], own)


@pytest.mark.parametrize("name", [*INPUTS, "params"])
def test_inputs_of_an_asyncio_engine(name: str) -> None:
    """At most two places: callers wait for them, in the order of their priorities."""
    expected()

    async def call(front: AsyncLLMEngine, how: str, given: dict[str, Any]) -> None:
        if how == "complete":
            await front.complete(**given)
        else:
            async for _ in front.generate(**given):
                pass

    async def test() -> None:
        own = engine()
        async with AsyncLLMEngine(own, max_requests=2) as front:
            good = [asyncio.create_task(front.complete(prompt, GOOD)) for prompt in golden_prompts(NAME)[:2]]
            given = [{"prompt": [1, 2, 3], "params": SamplingParams(max_tokens=2), name: value} for value in values()]
            calls = [call(front, how, one) for one in given for how in ("complete", "generate")]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            for end in ends:
                assert end is None or isinstance(end, ValueError), end
            assert sum(end is not None for end in ends) > 20
            results = await asyncio.gather(*good)
            assert [one.output_token_ids.tolist() for [one] in results] == expected()
            while front.stats.num_requests:
                await asyncio.sleep(0)
        assert_no_leak(own)

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(
    "name", [name for name in inspect.signature(Request).parameters if name not in ("block_hasher", "block_hashes")]
)
def test_requests_of_the_core(name: str) -> None:
    hasher = BlockHasher(2, seed="s")
    refusals = []
    for value in values():
        given = {"request_id": "a", "prompt_token_ids": [1, 2, 3, 4, 5], "block_hasher": hasher, name: value}
        try:
            request = Request(**given)
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert len(request.block_hashes) == request.num_tokens // 2
            request.append_output_token_ids([7, 8])
            repr(request)
    assert_are_clear(refusals, least=0 if name in ANYTHING else 20)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        *((LoRARequest, field.name) for field in dataclasses.fields(LoRARequest)),
        *((MultiModalFeature, field.name) for field in dataclasses.fields(MultiModalFeature)),
    ],
)
def test_parts_of_requests(made: type, name: str) -> None:
    good: dict[str, Any] = {"name": "a", "path": "", "adapter_id": None, "identifier": "i", "offset": 0, "length": 1}
    fields = {field.name: good[field.name] for field in dataclasses.fields(made)}
    hasher = BlockHasher(2, seed="s")
    refusals = []
    for value in values():
        try:
            part = made(**fields | {name: value})
        except ValueError as error:
            refusals.append(str(error))
            continue
        given = {"lora": part} if made is LoRARequest else {"mm_features": [part]}
        try:
            Request("a", [1, 2, 3, 4], block_hasher=hasher, **given)
        except ValueError as error:
            refusals.append(str(error))
    assert_are_clear(refusals)


@pytest.mark.parametrize("seed", range(8))
def test_many_at_once(seed: int) -> None:
    """Several wrong values in one call."""
    rng = np.random.default_rng(seed)
    own, queued = engine(), []
    expected()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for _ in range(125):
        pool = values()
        settings = {names[i]: pool[rng.integers(len(pool))] for i in rng.choice(len(names), 2)}
        given = {INPUTS[rng.integers(len(INPUTS))]: pool[rng.integers(len(pool))]}
        try:
            params = SamplingParams(**{"max_tokens": 3} | settings)
            queued.append(own.add_request(**{"prompt": [1, 2, 3], "params": params} | given))
        except ValueError:
            continue
    assert_others_are_untouched(queued, own)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("encoder", "encoder_features"),
        *((kind, name) for kind in ("vectors", "mrope") for name in ("embeds", "start", "identifier")),
        ("mrope", "prompt_positions"),
    ],
)
def test_inputs_of_models_that_take_more_than_tokens(kind: str, name: str) -> None:
    own, queued, refusals = input_engines.make_engine(kind), [], []
    placeholder = next(iter(own.model.config.placeholder_token_ids), 1)
    prompt = [1, placeholder, 2]
    for value in values():
        part = {"embeds": np.ones((1, own.model.config.embedding_dim or 1))}
        given: dict[str, Any] = {"prompt": prompt, "params": SamplingParams(max_tokens=2)}
        if kind == "mrope":
            given["prompt_positions"] = np.tile(np.arange(3), (3, 1))
        if name in ("encoder_features", "prompt_positions"):
            given[name] = value
        else:
            part[name] = value
        try:
            if kind != "encoder":
                given["embeddings"] = [MultimodalInput(**part)]
            queued.append(own.add_request(**given))
        except ValueError as error:
            refusals.append(str(error))
    assert_are_clear(refusals)
    assert all(one.finish_reason is FinishReason.LENGTH for one in input_engines.run(own, queued))
