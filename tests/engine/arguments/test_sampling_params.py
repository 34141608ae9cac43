"""Parameters that cannot be are refused, one clear error each, and nothing is queued."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvjax.engine import LLMEngine, SamplingParams
from kvjax.engine.sampling.sampler_lines import MAX_EDITS
from tests.engine.engines import assert_no_leak, make_engine

NAME = "llama"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": -0.1}, r"min_p in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p in \[0, 1\], got 1.1"),
        ({"min_p": float("nan")}, r"min_p in \[0, 1\], got nan"),
        ({"presence_penalty": 2.1}, r"presence_penalty in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -3}, r"frequency_penalty in \[-2, 2\], got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty > 0 .* got 0"),
        ({"repetition_penalty": float("inf")}, "finite repetition_penalty"),
        ({"logit_bias": {3: 101}}, r"logit_bias in \[-100, 100\], got 101.0 for token 3"),
        ({"logit_bias": {3: float("nan")}}, "got nan for token 3"),
        ({"min_tokens": -1}, "min_tokens >= 0, got -1"),
        ({"min_tokens": 17}, "min_tokens of at most max_tokens, got 17 and 16"),
        ({"stop": ""}, "stop strings of at least one character, got ''"),
        ({"stop": ("a", "")}, "at least one character, got ''"),
        ({"stop": (5,)}, "at least one character, got 5"),
        ({"logprobs": -1}, "logprobs >= 0 or None, got -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs >= 0 or None, got -2"),
        ({"allowed_token_ids": ()}, "allowed_token_ids that bad_token_ids do not all forbid, got none"),
        ({"allowed_token_ids": (1,), "bad_token_ids": (1, 2)}, "do not all forbid, got none"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {256: 1.0}}, "logit_bias of token ids below 256, got 256"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids of token ids below 256, got -1"),
        ({"bad_token_ids": (1000,)}, "bad_token_ids of token ids below 256, got 1000"),
        ({"bad_token_ids": (1,) * (MAX_EDITS + 1)}, f"at most {MAX_EDITS} tokens .* got {MAX_EDITS + 1}"),
        ({"stop": "a"}, "a tokenizer for stop strings, got one without"),
        ({"stream_text": True}, "a tokenizer for stream_text, got one without"),
        (
            {"allowed_token_ids": (9,), "stop_token_ids": (9,), "min_tokens": 1},
            "allowed_token_ids beside those that end the request with min_tokens, got none",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_anything_is_queued(settings: dict[str, Any], message: str) -> None:
    engine = make_engine(NAME)
    params = SamplingParams(**settings)
    with pytest.raises(ValueError, match=message):
        engine.add_request([1, 2], params)
    with pytest.raises(ValueError, match=message):
        engine.check_request([1, 2], params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], [2]], [SamplingParams(), params])
    assert_no_leak(engine)


def test_a_sampler_of_the_callers_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    assert isinstance(engine, LLMEngine)
    limits = engine._maker._limits
    object.__setattr__(limits, "sampler_sizes", None)
    with pytest.raises(ValueError, match="a sample_fn of one's own, which does not know them"):
        engine.add_request([1], SamplingParams(min_p=0.5))
    assert_no_leak(engine)


def test_a_stop_string_may_come_alone() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["end", "\n"]).stop_strings == ("end", "\n")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 0.0}, "got 'temprature'; did you mean 'temperature'?"),
        ({"zzz": 0}, "got 'zzz'; there are n, "),
        ({"best_of": 2}, "got 'best_of'; there are n, "),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_known_one(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)


def test_an_unknown_input_is_refused_with_the_nearest_known_one_and_nothing_is_queued() -> None:
    engine = make_engine(NAME)
    with pytest.raises(ValueError, match=r"inputs of a prompt .* got 'cache_sat'; did you mean 'cache_salt'\?"):
        engine.generate([[1, 2, 3]], inputs=[{"cache_sat": "a"}])
    assert engine.num_unfinished == 0
    assert_no_leak(engine)
