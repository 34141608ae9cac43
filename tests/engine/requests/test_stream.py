"""Streams: the tokens of `generate`, one after another; who closes one leaves nothing behind."""

from __future__ import annotations

import gc
import itertools

import pytest

from kvjax.engine import FinishReason, LLMEngine, SamplingParams, StreamOutput, TokenStream
from tests.engine.engines import assert_no_leak, golden_prompts, loaded, make_engine

NAME = "llama"


def params_of(i: int) -> SamplingParams:
    return SamplingParams(n=1 + i % 2, max_tokens=6 + i, temperature=0.7, seed=i)


PARAMS = [params_of(i) for i in range(4)]


def start(engine: LLMEngine) -> TokenStream:
    return engine.stream(golden_prompts(NAME)[:4], PARAMS)


def expected() -> list[list[int]]:
    results = make_engine(NAME).generate(golden_prompts(NAME)[:4], PARAMS)
    assert [(one.prompt, one.sample) for one in results] == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    return [result.output_token_ids.tolist() for result in results]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_stream_brings_each_token_once_and_a_result_with_the_last(async_scheduling: bool) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling)
    outputs: dict[tuple[int, int], list[StreamOutput]] = {}
    for output in start(engine):
        outputs.setdefault((output.prompt, output.sample), []).append(output)
    assert sorted(outputs) == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert [[one.token_id for one in outputs[place]] for place in sorted(outputs)] == expected()
    for place, own in outputs.items():
        assert [one.result is None for one in own] == [True] * (len(own) - 1) + [False]
        result = own[-1].result
        assert result is not None
        assert result.request_id == own[0].request_id
        assert (result.prompt, result.sample) == place
        assert [one.logprob for one in own] == list(result.logprobs)
        assert all(one.text is None for one in own)  # the model has no tokenizer
    assert engine.generate([[1]])[0].finish_reason is FinishReason.LENGTH
    assert_no_leak(engine)


@pytest.mark.parametrize("how", ["close", "with", "forget", "raise"])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_a_stream_that_is_left_aborts_what_is_unfinished(how: str, num_tokens: int) -> None:
    engine = make_engine(NAME, async_scheduling=True, max_num_seqs=2)
    stream = start(engine)
    for _ in range(num_tokens):
        next(stream)
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "raise":
        with pytest.raises(RuntimeError), stream:
            raise RuntimeError
    else:
        del stream
        gc.collect()
        engine.add_request([1])
        assert engine.num_unfinished == 1
        engine.reset()
    if how != "forget":
        assert next(stream, None) is None
    assert engine.num_unfinished == 0
    assert_no_leak(engine)
    assert [result.output_token_ids.tolist() for result in engine.generate(golden_prompts(NAME)[:4], PARAMS)] == (
        expected()
    )


def test_streams_and_calls_of_generate_share_the_steps() -> None:
    engine = make_engine(NAME)
    first, second = start(engine), start(engine)
    tokens: list[list[int]] = [[], []]
    for output in first:
        tokens[0].append(output.token_id)
        tokens[1].append(next(second).token_id)
        if len(tokens[0]) == 5:
            results = engine.generate(golden_prompts(NAME)[:4], PARAMS)
            assert [result.output_token_ids.tolist() for result in results] == expected()
    assert sorted(tokens[0]) == sorted(tokens[1]) == sorted(itertools.chain.from_iterable(expected()))
    assert_no_leak(engine)


def test_while_a_stream_is_open_requests_of_others_are_refused() -> None:
    engine = make_engine(NAME)
    stream = start(engine)
    for call in (lambda: engine.add_request([1]), engine.step):
        with pytest.raises(ValueError, match="expected no open stream; read it to its end or close it"):
            call()
    stream.close()
    engine.add_request([1])
    with pytest.raises(ValueError, match="engine without requests, got 1 unfinished"):
        start(engine)
    engine.step()
    engine.reset()
    with pytest.raises(ValueError, match="one params or 1, got 2"):
        engine.stream([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(ValueError, match="expected inputs of 1 prompts, got 2"):
        engine.stream([[1]], inputs=[{}, {}])
    with pytest.raises(ValueError, match="has no tokenizer"):
        engine.stream([[1], "text"])
    assert_no_leak(engine)


def test_a_request_of_a_stream_that_is_aborted_by_its_id_ends_without_a_result() -> None:
    engine = make_engine(NAME)
    stream = start(engine)
    request_id = next(stream).request_id
    engine.abort(request_id)
    outputs = list(stream)
    assert request_id not in {output.request_id for output in outputs if output.result is not None}
    assert sum(output.result is not None for output in outputs) == 5
    assert_no_leak(engine)


def test_a_text_is_one_prompt() -> None:
    engine = make_engine("demo")
    tokenizer = loaded("demo").tokenizer
    assert tokenizer is not None
    params = SamplingParams(max_tokens=24, temperature=0.0)
    [result] = engine.generate("let a = 1", params)
    assert result.prompt_token_ids.tolist() == list(tokenizer.encode("let a = 1"))
    outputs = list(engine.stream("let a = 1", params))
    assert [output.token_id for output in outputs] == result.output_token_ids.tolist()
    assert "".join(output.text or "" for output in outputs) == tokenizer.decode(result.output_token_ids.tolist())
    assert_no_leak(engine)
