"""What looks like prompts or params and is neither is refused in one sentence with the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core.tables.given_values import as_text
from kvjax.engine import SamplingParams
from tests.engine.engines import assert_no_leak, golden_prompts, make_engine

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
NO_LIST = "expected a list of prompts, each a text, a list of token ids or an integer array, got "
NO_PROMPT = "expected a prompt as a text, a list of token ids or an integer array, got "
ONE_PROMPT = r"expected a list of prompts, got the token ids of one: put them in a list, \[token_ids\]"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, NO_LIST + "None"),
        (7, NO_LIST + "a int"),
        (b"text", NO_LIST + "a bytes"),
        ({"prompt": "text"}, NO_LIST + "a dict"),
        ([3, 1, 4], ONE_PROMPT),
        (np.array([3, 1, 4]), ONE_PROMPT),
        ([[3, 1, 4], None], NO_PROMPT + "None"),
        ([{"prompt_token_ids": [3]}], NO_PROMPT + "a dict"),
        ([b"text"], NO_PROMPT + "a bytes"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(prompts: Any, message: str) -> None:
    engine = make_engine("llama")
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=message):
            call(prompts, PARAMS)
    assert_no_leak(engine)


@pytest.mark.parametrize("prompt", [None, 3, b"text", {"prompt": "text"}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=NO_PROMPT):
        make_engine("llama").add_request(prompt, PARAMS)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, [{"max_tokens": 2}]])
def test_a_dict_is_no_params(params: Any) -> None:
    engine = make_engine("llama")
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=r"got {'max_tokens': 2}: write SamplingParams\(\*\*params\)"):
            call([[3, 1]], params)
    with pytest.raises(ValueError, match=r"expected params as SamplingParams or None, got 'greedy'$"):
        engine.add_request([3, 1], "greedy")  # type: ignore[arg-type]
    assert_no_leak(engine)


def test_any_iterable_of_prompts_will_do() -> None:
    engine, prompts = make_engine("llama"), golden_prompts("llama")[:2]
    expected = [result.output_token_ids.tolist() for result in engine.generate(prompts, PARAMS)]
    for given in (tuple(prompts), (prompt.tolist() for prompt in prompts), np.stack([prompts[0][:37]] * 2)):
        results = engine.generate(given, PARAMS)  # type: ignore[arg-type]
        assert len(results) == 2
        if not isinstance(given, np.ndarray):
            assert [result.output_token_ids.tolist() for result in results] == expected


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(
        ValueError, match=r"got half a pair: .*; text\.encode\(errors='replace'\)\.decode\(\) has none$"
    ):
        as_text("a prompt", "ab\ud800")
    assert as_text("a prompt", "ab\ud800".encode(errors="replace").decode()) == "ab?"
