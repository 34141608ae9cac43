"""Laws of the output's text: what a stop string cuts, what pieces add up to, and which token ends the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.engine import FinishReason, SamplingParams
from kvjax.engine.output_text import OutputText
from tests.engine.engines import assert_no_leak, golden_prompts, loaded, make_engine
from tests.engine.test_text import ByteTokenizer

ALPHABET = list("aab ü€𝄞")


def naive_end(text: str, stop: tuple[str, ...], *, includes: bool) -> str | None:
    """Where a text ends whose characters come one by one; None: it goes on. The oracle."""
    for end in range(len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)  # begins first
            return text[:end] if includes else text[: end - len(longest)]
    return None


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_text_ends_where_the_first_stop_string_does(seed: int, includes: bool) -> None:
    """Tokens are bytes, so strings and characters are spread over them, and text comes a character at a time."""
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(ALPHABET, size=60))
    stop = tuple("".join(rng.choice(ALPHABET, size=rng.integers(1, 5))) for _ in range(3))
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes, max_tokens=999)
    output, pieces, tokens = OutputText(ByteTokenizer(), params), [], ByteTokenizer().encode(text)
    expected = naive_end(text, stop, includes=includes)
    for count, token in enumerate(tokens, start=1):
        has_ended = output.push(token)
        so_far = bytes(tokens[:count]).decode(errors="ignore")
        assert has_ended == (naive_end(so_far, stop, includes=includes) is not None)
        pieces.append(output.take())
        if has_ended:
            break
    output.finish()
    pieces.append(output.take())
    assert "".join(pieces) == output.whole(np.array(tokens)) == (text if expected is None else expected)


def test_a_stop_string_within_one_token_cuts_what_is_behind_it() -> None:
    class Words(ByteTokenizer):
        def decode(self, token_ids: Any) -> str:
            return "".join(["one ", "two three ", "four"][token] for token in token_ids)

    for includes, expected in ((False, "one two "), (True, "one two three")):
        output = OutputText(Words(), SamplingParams(stop="three", include_stop_str_in_output=includes))
        assert [output.push(token) for token in (0, 1)] == [False, True]
        assert output.whole(np.array([0, 1])) == expected


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop="abc"))
    seen = []
    for token in b"xababd":
        assert not output.push(token)
        seen.append(output.take())
    assert seen == ["x", "", "", "ab", "", "abd"]


def test_no_stop_string_ends_a_request_before_min_tokens() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop="a", min_tokens=4))
    assert [output.push(token) for token in b"abbbb"] == [False] * 5
    output = OutputText(ByteTokenizer(), SamplingParams(stop="bb", min_tokens=4))
    assert [output.push(token) for token in b"bbbb"] == [False, False, False, True]
    assert output.whole(np.zeros(0)) == "bb"


GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_ends_with_its_stop_string_and_streams_its_text(async_scheduling: bool) -> None:
    tokenizer = loaded("demo").tokenizer
    assert tokenizer is not None
    prompts = golden_prompts("demo")[:3]
    plain = make_engine("demo").generate(prompts, SamplingParams(**GREEDY))
    engine = make_engine("demo", async_scheduling=async_scheduling)
    texts = [tokenizer.decode(result.output_token_ids) for result in plain]
    assert [result.text for result in plain] == texts
    stop = texts[0][len(texts[0]) // 2 :][:5]
    params = SamplingParams(stop=(stop, "no such text"), stream_text=True, **GREEDY)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    names.append(engine.add_request(prompts[0], SamplingParams(**GREEDY)))
    pieces, results = dict.fromkeys(names, ""), {}
    while engine.num_unfinished:
        for output in engine.step():
            assert (output.text is None) == (output.request_id == names[-1])
            pieces[output.request_id] += output.text or ""
            if output.result is not None:
                results[output.request_id] = output.result
    for name, text in zip(names[:3], texts, strict=True):
        result = results[name]
        assert pieces[name] == result.text == text.split(stop)[0]
        assert result.finish_reason is (FinishReason.STOP if stop in text else FinishReason.LENGTH)
        assert stop in tokenizer.decode(result.output_token_ids) or stop not in text
        assert stop not in tokenizer.decode(result.output_token_ids[:-1])
    assert results[names[-1]].text == texts[0]
    engine.step()
    assert_no_leak(engine)


def test_special_tokens_are_in_the_text_where_they_are_asked_for() -> None:
    tokenizer, eos = loaded("demo").tokenizer, loaded("demo").config.eos_token_ids[0]
    assert tokenizer is not None
    for skip, ends_with in ((True, ""), (False, tokenizer.decode([eos], skip_special_tokens=False))):
        for stream in (False, True):
            params = SamplingParams(logit_bias={eos: 100}, skip_special_tokens=skip, stream_text=stream)
            assert make_engine("demo").generate([golden_prompts("demo")[0]], params)[0].text == ends_with
    assert ends_with
