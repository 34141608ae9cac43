"""Requests that change their logits, in the whole engine: in any schedule the tokens are those of a naive loop."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvjax.device import count_compilations
from kvjax.engine import FinishReason, LLMEngine, SamplingParams
from kvjax.engine.requests.token_matcher import packed
from tests.engine.engines import FEW_BLOCKS, assert_no_leak, base_config, golden_prompts, loaded, make_engine
from tests.engine.sampling.naive_sampler import chosen, edited
from tests.models.families import RecordingEngine
from tests.models.golden_models import goldens_of
from tests.spoiled_arrays import spoil

NAME = "llama"
NUM_TOKENS = 12

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.9, "frequency_penalty": 2.0, "min_p": 0.02},
    {
        "temperature": 0.0,
        "allowed_token_ids": tuple(range(10, 40)),
        "presence_penalty": -2.0,
        "frequency_penalty": -1.0,
    },
    {"temperature": 0.7, "logit_bias": {5: 8.0, 6: 7.5, 7: 7.0}, "repetition_penalty": 1.2, "top_k": 30},
    {"temperature": 1.2, "top_p": 0.9},
)


def params_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=i, **PARAMS[i])


@functools.cache
def naive_outputs() -> list[list[int]]:
    """A token at a time, each by a request of its own that asks nothing but logits."""
    outputs = []
    engine = RecordingEngine(loaded(NAME), base_config(NAME))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    for i, prompt in enumerate(golden_prompts(NAME)[: len(PARAMS)]):
        params, output = params_of(i), []
        for k in range(NUM_TOKENS):
            result = engine.generate([[*prompt, *output]], greedy)[0]
            logits = edited(engine.logits[result.request_id][0], params, prompt.tolist(), output)
            output.append(chosen(logits, params, i, prompt.size + k))
        outputs.append(output)
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 2, "order": [5, 4, 3, 2, 1, 0]},
        {"max_num_batched_tokens": 9},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"async_scheduling": True},
        {"num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
        {"async_scheduling": True, "num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
    ],
)
def test_the_tokens_are_those_of_a_naive_loop(settings: dict[str, Any]) -> None:
    order = settings.pop("order", list(range(len(PARAMS))))
    engine, prompts = make_engine(NAME, **settings), golden_prompts(NAME)
    for _ in range(2):  # with cached prefixes, and lines that others had
        results = engine.generate([prompts[i] for i in order], [params_of(i) for i in order])
        for i, result in zip(order, results, strict=True):
            assert result.output_token_ids.tolist() == naive_outputs()[i], PARAMS[i]
    assert_no_leak(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_samples_that_are_forked_count_the_prompt_too(async_scheduling: bool) -> None:
    prompt, params = golden_prompts(NAME)[0], {"max_tokens": 10, "temperature": 0.8, "repetition_penalty": 1.9}
    together = make_engine(NAME, async_scheduling=async_scheduling).generate(
        [prompt], SamplingParams(n=4, seed=3, **params)
    )
    alone = [make_engine(NAME).generate([prompt], SamplingParams(seed=3 + i, **params))[0] for i in range(4)]
    assert [one.output_token_ids.tolist() for one in together] == [one.output_token_ids.tolist() for one in alone]
    assert any(one.stats.num_shared_tokens for one in together)


def test_no_stop_token_comes_before_min_tokens() -> None:
    prompt = golden_prompts(NAME)[0]
    plain = make_engine(NAME).generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))[0]
    stop = tuple(set(plain.output_token_ids[:3].tolist()))
    params = SamplingParams(max_tokens=8, min_tokens=3, temperature=0.0, stop_token_ids=stop, logit_bias={stop[0]: 50})
    result = make_engine(NAME, async_scheduling=True).generate([prompt], params)[0]
    assert not set(result.output_token_ids[:3].tolist()) & set(stop)
    assert result.output_token_ids[3:].tolist() == [stop[0]]
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_compiles_after_warm_up(async_scheduling: bool) -> None:
    engine = LLMEngine(loaded(NAME), base_config(NAME, async_scheduling=async_scheduling))
    engine.warmup()
    params = [SamplingParams(max_tokens=4, **PARAMS[i % len(PARAMS)]) for i in range(20)]
    with count_compilations() as count:
        engine.generate([np.arange(1 + 6 * i) % 256 for i in range(20)], params)
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4, token_matcher=Digits))
    assert count.num_programs == 0


class Digits:
    """A toy grammar: two to four of the tokens 48 to 57, no two equal in a row, then token 2."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self) -> list[int]:
        digits = [token for token in range(48, 58) if token != (self.tokens or [0])[-1]]
        if len(self.tokens) == 4:
            return [2]
        return digits + [2] * (len(self.tokens) >= 2)

    def fill_bitmask(self, words: np.ndarray) -> None:
        words[:] = packed(np.array(self.allowed()), words.size)

    def accept_token(self, token_id: int) -> None:
        assert token_id in self.allowed()
        self.tokens.append(token_id)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 2},
        {"async_scheduling": True, "num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
    ],
)
def test_a_grammar_is_followed_beside_requests_without_one(settings: dict[str, Any]) -> None:
    prompts = golden_prompts(NAME)
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    expected = make_engine(NAME).generate(prompts, plain)
    engine = make_engine(NAME, **settings)
    grammar = SamplingParams(
        n=2, max_tokens=8, seed=1, temperature=2.0, token_matcher=Digits, stop_token_ids=(2,), logit_bias={48: 3.0}
    )
    each = [plain, grammar] * 3
    results = engine.generate(prompts, each)
    by_id = {result.request_id: result for result in results}
    for i, params in enumerate(each):
        if params is plain:
            name = list(by_id)[i + i // 2]
            assert by_id[name].output_token_ids.tolist() == expected[i].output_token_ids.tolist()
    followed = [result for result in results if result.finish_reason is FinishReason.STOP]
    assert len(followed) == 6
    for result in followed:
        *digits, end = result.output_token_ids.tolist()
        assert end == 2
        assert 2 <= len(digits) <= 4
        assert set(digits) <= set(range(48, 58))
    assert len({tuple(result.output_token_ids.tolist()) for result in followed}) > 3
    assert_no_leak(engine)


@functools.cache
def base_engine_with_logprobs(num_blocks: int) -> LLMEngine:
    """Holds a compiled step that gives the best tokens; runs nothing itself."""
    return LLMEngine(loaded(NAME), base_config(NAME, num_blocks=num_blocks, max_logprobs=5))


def engine_with_logprobs(**settings: Any) -> LLMEngine:
    """An engine that gives the best tokens, without a compilation of its own."""
    config = base_config(NAME, max_logprobs=5, **settings)
    assert config.num_blocks is not None
    return LLMEngine(loaded(NAME), config, like=base_engine_with_logprobs(config.num_blocks))


with_settings = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True, "max_num_seqs": 3},
        {"async_scheduling": True, "num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
    ],
)


@functools.cache
def expected_best() -> list[tuple[list[int], list[np.ndarray]]]:
    """Greedy tokens of each prompt, and the logits that they were chosen from."""
    engine = RecordingEngine(loaded(NAME), base_config(NAME))
    results = engine.generate(golden_prompts(NAME), SamplingParams(max_tokens=8, temperature=0.0))
    return [(result.output_token_ids.tolist(), engine.logits[result.request_id]) for result in results]


@with_settings
def test_the_best_tokens_come_where_they_are_asked_for(settings: dict[str, Any]) -> None:
    engine = engine_with_logprobs(**settings)
    counts, prompts = [0, 1, 5, None, 3, 2], golden_prompts(NAME)
    params = [SamplingParams(max_tokens=8, temperature=0.0, logprobs=k, presence_penalty=0.0) for k in counts]
    names = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    seen: dict[str, list[Any]] = {name: [] for name in names}
    results = {}
    while engine.num_unfinished:
        for output in engine.step():
            seen[output.request_id].append(output.top_logprobs)
            results[output.request_id] = output.result
    for name, k, (tokens, logits) in zip(names, counts, expected_best(), strict=True):
        result = results[name]
        assert result is not None
        assert result.output_token_ids.tolist() == tokens
        if not k:
            assert result.top_logprobs is None
            assert seen[name] == [None] * 8
            continue
        best = result.top_logprobs
        assert best is not None
        log = np.array(logits, np.float64)
        log -= np.log(np.exp(log).sum(axis=-1, keepdims=True))
        order = np.argsort(-log, axis=-1, kind="stable")[:, :k]
        assert best.token_ids.tolist() == order.tolist()
        np.testing.assert_allclose(best.logprobs, np.take_along_axis(log, order, axis=-1), atol=1e-5)
        assert best.ranks.tolist() == [1] * 8
        np.testing.assert_array_equal(np.concatenate([one.token_ids for one in seen[name]]), best.token_ids)
    engine.step()
    assert_no_leak(engine)


def test_ranks_are_those_of_the_chosen_tokens_before_penalties() -> None:
    engine, prompt = engine_with_logprobs(), [5, 6, 7]
    plain = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=5))[0]
    assert plain.top_logprobs is not None
    best = plain.top_logprobs.token_ids[0].tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, bad_token_ids=tuple(best[:3]))
    result = engine.generate([prompt], params)[0]
    assert result.top_logprobs is not None
    assert result.output_token_ids.tolist() == [best[3]]
    assert result.top_logprobs.ranks.tolist() == [4]
    assert result.top_logprobs.token_ids.tolist() == [best[:2]]


def test_more_of_the_best_than_the_engine_was_made_for_are_refused() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=rf"{name} of at most 0 \(EngineConfig.max_logprobs\), got 1"):
            make_engine(NAME).add_request([1], SamplingParams(**{name: 1}))
    with pytest.raises(ValueError, match="logprobs of at most 5"):
        engine_with_logprobs().add_request([1], SamplingParams(logprobs=6))
    with pytest.raises(ValueError, match="max_logprobs >= 0, got -1"):
        base_config(NAME, max_logprobs=-1)


@with_settings
def test_prompts_have_the_log_probabilities_that_the_model_gives_them(settings: dict[str, Any]) -> None:
    """The golden logits are Hugging Face's, of every token of the prompt. Nothing is read from the prefix cache."""
    engine = engine_with_logprobs(**settings)
    goldens = goldens_of(NAME)
    counts = [0, 1, 5, None, 3, 2]
    params = [SamplingParams(n=1 + k % 2, max_tokens=3, prompt_logprobs=count) for k, count in enumerate(counts)]
    for _ in range(2):
        results = engine.generate([golden.prompt for golden in goldens], params)
        owners = [k for k, one in enumerate(params) for _ in range(one.n)]
        for k, result in zip(owners, results, strict=True):
            if counts[k] is None:
                assert result.prompt_logprobs is None
                continue
            scores, prompt = result.prompt_logprobs, goldens[k].prompt
            assert scores is not None
            assert np.isnan(scores.logprobs).tolist() == [True] + [False] * (prompt.size - 1)
            assert scores.top.token_ids[0].tolist() == [-1] * counts[k]
            log = goldens[k].logits.astype(np.float64)
            log -= np.log(np.exp(log).sum(axis=-1, keepdims=True))
            places = goldens[k].positions[:-1] + 1
            log, top = log[:-1], scores.top
            own = np.take_along_axis(log, prompt[places, None], axis=-1)
            np.testing.assert_allclose(scores.logprobs[places], own[:, 0], atol=1e-4)
            best = np.sort(log, axis=-1)[:, ::-1][:, : counts[k]]
            np.testing.assert_allclose(top.logprobs[places], best, atol=1e-4)
            of_ids = np.take_along_axis(log, top.token_ids[places], axis=-1)
            np.testing.assert_allclose(of_ids, top.logprobs[places], atol=1e-4)
            assert (top.ranks[places] > (log > own + 1e-4).sum(axis=-1)).all()
            assert (top.ranks[places] <= (log > own - 1e-4).sum(axis=-1)).all()
            assert (result.stats.num_cached_tokens or 0) == result.stats.num_shared_tokens
            spoil(result)  # the other sample of the prompt has arrays of its own
    assert_no_leak(engine)


def test_log_probabilities_of_everything_compile_nothing_after_warm_up() -> None:
    engine = LLMEngine(loaded(NAME), base_config(NAME, max_logprobs=3, max_buckets=2, async_scheduling=True))
    engine.warmup()
    params = [SamplingParams(max_tokens=3, logprobs=i % 4, prompt_logprobs=(None, 3, 0)[i % 3]) for i in range(12)]
    with count_compilations() as count:
        engine.generate([np.arange(1 + 9 * i) % 256 for i in range(12)], params)
    assert count.num_programs == 0


def test_prompt_log_probabilities_need_an_engine_that_was_made_for_them() -> None:
    with pytest.raises(ValueError, match=r"an engine with EngineConfig\.max_logprobs >= 1, got 0"):
        make_engine(NAME).add_request([1], SamplingParams(prompt_logprobs=0))
