"""Salts and adapters of requests keep cached prefixes apart, and change nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.engine import LLMEngine, SamplingParams
from tests.engine.engines import assert_no_leak, golden_prompts, make_engine

NAME = "qwen3"


def cached_tokens(engine: LLMEngine, **keys: Any) -> int | None:
    [result] = engine.generate([golden_prompts(NAME)[0]], SamplingParams(max_tokens=3, temperature=0.0), [keys])
    return result.stats.num_cached_tokens


@pytest.mark.parametrize("key", ["cache_salt", "lora_name"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_equal_keys_share_and_others_do_not(key: str, async_scheduling: bool) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling)
    whole = (golden_prompts(NAME)[0].size - 1) // 8 * 8
    found = [cached_tokens(engine, **({} if value is None else {key: value})) for value in (None, "a", "a", "b", None)]
    assert found == [0, 0, whole, 0, whole]
    assert_no_leak(engine)


def test_a_salt_and_an_adapter_of_one_name_are_not_the_same() -> None:
    engine = make_engine(NAME)
    assert [cached_tokens(engine, cache_salt="a"), cached_tokens(engine, lora_name="a")] == [0, 0]


def test_samples_have_their_prompts_keys() -> None:
    engine, params = make_engine(NAME, max_num_seqs=1), SamplingParams(n=2, max_tokens=2)
    results = engine.generate([golden_prompts(NAME)[0]] * 2, params, [{"cache_salt": "a"}, {"cache_salt": "b"}])
    whole = (golden_prompts(NAME)[0].size - 1) // 8 * 8
    assert [result.stats.num_cached_tokens for result in results] == [0, whole, 0, whole]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cache_salt": ""}, "expected cache_salt that is not empty"),
        ({"lora_name": ""}, "expected lora_name that is not empty"),
    ],
)
def test_keys_without_text_are_refused(keys: dict[str, str], message: str) -> None:
    engine = make_engine(NAME)
    for call in (engine.add_request, engine.check_request):
        with pytest.raises(ValueError, match=message):
            call([1, 2], **keys)
    assert_no_leak(engine)


def test_generate_wants_inputs_of_every_prompt() -> None:
    engine = make_engine(NAME)
    with pytest.raises(ValueError, match="expected inputs of 2 prompts, got 1"):
        engine.generate([[1], [2]], None, [{}])
    with pytest.raises(ValueError, match="expected no encoder_features"):
        engine.generate([[1], [2]], None, [{}, {"encoder_features": np.zeros(3)}])
    assert_no_leak(engine)
