"""A request whose own matcher or tokenizer raises ends alone: others go on, and what is cached stays."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest
from flax import nnx

from kvjax.engine import AsyncLLMEngine, FinishReason, LLMEngine, SamplingParams
from kvjax.errors import NonFiniteLogitsError, StepFailedError
from tests.engine.engines import (
    FEW_BLOCKS,
    assert_no_leak,
    base_config,
    base_engine,
    golden_prompts,
    loaded,
    make_engine,
)
from tests.engine.failures import plant
from tests.engine.requests.test_output_text import ByteTokenizer

NAME = "llama"
PLAIN = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
UPDATE_STEP = "kvjax.device.steps.update_step.UpdateStep.__call__"


class Failing:
    """A matcher that raises in its n-th call of one of its methods."""

    def __init__(self, method: str, number: int) -> None:
        self._method = method
        self._left = number

    def fill_bitmask(self, words: np.ndarray) -> None:
        words[:] = 0 if self._method == "fill_bitmask" and not self._left else -1
        self._count("fill_bitmask")

    def accept_token(self, token_id: int) -> None:
        self._count("accept_token")

    def _count(self, method: str) -> None:
        self._left -= method == self._method
        if self._left < 0:
            raise RuntimeError("planted in the matcher")


class FailingTokenizer(ByteTokenizer):
    """Raises where a text has an `x`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = super().decode(token_ids)
        if "x" in text:
            raise RuntimeError("planted in the tokenizer")
        return text


@functools.cache
def expected() -> list[list[int]]:
    results = make_engine(NAME).generate(golden_prompts(NAME)[:3], PLAIN)
    return [result.output_token_ids.tolist() for result in results]


def failing(method: str, number: int, **settings: int) -> SamplingParams:
    return dataclasses.replace(PLAIN, token_matcher=lambda: Failing(method, number), **settings)


@pytest.mark.parametrize(("num_blocks", "async_scheduling"), [(FEW_BLOCKS[NAME], True), (600, False)])
@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("method", ["fill_bitmask", "accept_token"])
def test_a_matcher_that_raises_ends_its_request_and_nothing_else(
    method: str, number: int, async_scheduling: bool, num_blocks: int
) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling, num_blocks=num_blocks)
    manager, prompts = engine.manager, golden_prompts(NAME)
    names = [engine.add_request(prompt, PLAIN) for prompt in prompts[:3]]
    bad = engine.add_request(prompts[3], failing(method, number))
    results = {}
    while engine.has_work:
        results |= {one.request_id: one for one in engine.step().results.values()}
    assert [results[name].output_token_ids.tolist() for name in names] == expected()
    assert results[bad].finish_reason is FinishReason.ERROR
    assert str(results[bad].error) == "planted in the matcher"
    assert results[bad].output_token_ids.size == number + 1
    assert all(results[name].error is None for name in names)
    assert engine.manager is manager
    assert engine.generate([prompts[0]], PLAIN)[0].stats.num_cached_tokens
    assert_no_leak(engine)


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_call_raises_what_a_matcher_of_its_own_did_and_the_cache_stays(how: str) -> None:
    engine = make_engine(NAME, async_scheduling=True)
    manager, prompts = engine.manager, golden_prompts(NAME)[:3]
    with pytest.raises(RuntimeError, match="planted in the matcher"):
        list(getattr(engine, how)(prompts, [PLAIN, failing("accept_token", 3, n=2), PLAIN]))
    assert_no_leak(engine)
    results = engine.generate(prompts, PLAIN)
    assert [result.output_token_ids.tolist() for result in results] == expected()
    assert engine.manager is manager
    assert any(result.stats.num_cached_tokens for result in results)


def test_other_callers_of_an_asyncio_engine_get_their_tokens() -> None:
    async def test() -> None:
        prompts = golden_prompts(NAME)
        async with AsyncLLMEngine(make_engine(NAME, async_scheduling=True)) as front:
            calls = [front.complete(prompt, PLAIN) for prompt in prompts[:3]]
            bad = front.complete(prompts[3], failing("fill_bitmask", 2, n=2))
            *results, error = await asyncio.gather(*calls, bad, return_exceptions=True)
            assert isinstance(error, StepFailedError)
            assert "the request's own matcher or tokenizer failed: RuntimeError('planted" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
            assert [one[0].output_token_ids.tolist() for one in results if isinstance(one, list)] == expected()
            while front.stats.num_requests:
                await asyncio.sleep(0)
            assert front.stats.num_finished == 3
        assert_no_leak(front.engine)

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("stream_text", [False, True])
def test_a_tokenizer_that_raises_ends_the_requests_whose_text_it_was(stream_text: bool) -> None:
    model = dataclasses.replace(loaded(NAME), tokenizer=FailingTokenizer())  # type: ignore[arg-type]
    engine = LLMEngine(model, base_config(NAME), like=base_engine(NAME, 600))
    names = [engine.add_request([1, 2], dataclasses.replace(PLAIN, stream_text=stream_text)) for _ in range(2)]
    names.append(
        engine.add_request([1, 2], SamplingParams(max_tokens=3, logit_bias={ord("x"): 100.0}, stream_text=stream_text))
    )
    results = {}
    while engine.has_work:
        results |= {one.request_id: one for one in engine.step().results.values()}
    assert results[names[2]].finish_reason is FinishReason.ERROR
    assert results[names[2]].text is None
    assert str(results[names[2]].error) == "planted in the tokenizer"
    assert all(
        results[name].text == ByteTokenizer().decode(results[name].output_token_ids.tolist()) for name in names[:2]
    )
    assert_no_leak(engine)


def test_a_matcher_that_cannot_be_made_again_ends_its_request_after_a_broken_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers = iter([lambda: Failing("none", 0), lambda: 1 // 0])
    engine = make_engine(NAME)
    names = [engine.add_request(prompt, PLAIN) for prompt in golden_prompts(NAME)[:3]]
    bad = engine.add_request([1], dataclasses.replace(PLAIN, token_matcher=lambda: next(makers)()))
    plant(monkeypatch, UPDATE_STEP, {4: RuntimeError}, "after")
    results = {}
    for _ in range(4):
        engine.step()
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    while engine.has_work:
        results |= {one.request_id: one for one in engine.step().results.values()}
    assert [results[name].output_token_ids.tolist() for name in names] == expected()
    assert isinstance(results[bad].error, ZeroDivisionError)
    assert_no_leak(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_end_their_request_and_nothing_else(bad: float, async_scheduling: bool) -> None:
    """A row of the embeddings is no number, so a prompt that has its token gives no logits that are."""
    model = loaded(NAME)
    prompts = golden_prompts(NAME)[:3]
    missing = next(token for token in range(256) if all(token not in prompt for prompt in prompts))
    module = nnx.clone(model.module)
    rows = module.embed_tokens.embedding
    rows[...] = rows[...].at[missing].set(bad)
    engine = LLMEngine(
        dataclasses.replace(model, module=module), base_config(NAME, async_scheduling=async_scheduling, num_blocks=600)
    )
    names = [engine.add_request(prompt, PLAIN) for prompt in prompts]
    lost = engine.add_request([*prompts[0][:9], missing], PLAIN)
    results = {}
    while engine.has_work:
        results |= {one.request_id: one for one in engine.step().results.values()}
    assert results[lost].finish_reason is FinishReason.ERROR
    assert results[lost].output_token_ids.size == 1
    with pytest.raises(NonFiniteLogitsError, match=f"finite logits of request '{lost}' at token 10, got NaN"):
        results[lost].checked()
    assert [results[name].finish_reason for name in names] == [FinishReason.LENGTH] * 3
    assert [results[name].output_token_ids.tolist() for name in names] == expected()
    assert_no_leak(engine)
