"""Laws of the output's text: what a stop string cuts, what pieces add up to, and which token ends the request."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from kvjax.engine import FinishReason, LLMEngine, SamplingParams
from kvjax.engine.requests.output_text import OutputText
from kvjax.models.tokenizer import Tokenizer
from tests.engine.engines import (
    assert_no_leak,
    base_config,
    base_engine,
    golden_prompts,
    loaded,
    make_engine,
)
from tests.engine.requests.test_text_stream import NUM_CASES, text_behind
from tests.engine.requests.tokenizer_kinds import KINDS, random_tokens, tokenizer_of

ALPHABET = list("aab ü€𝄞")


class ByteTokenizer:
    """Bytes as tokens, nothing between prompt and output."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def is_open(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        return False


def stops(output: OutputText, token_ids: Iterable[int]) -> list[bool]:
    """Whether the output is stopped behind each of its next tokens."""
    found = []
    for token in token_ids:
        output.push(token)
        found.append(output.is_stopped)
    return found


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
        output.push(token)
        so_far = bytes(tokens[:count]).decode(errors="ignore")
        assert output.is_stopped == (naive_end(so_far, stop, includes=includes) is not None)
        pieces.append(output.take())
        if output.is_stopped:
            break
    output.finish()
    pieces.append(output.take())
    assert "".join(pieces) == output.whole(np.array(tokens)) == (text if expected is None else expected)


def check_stops(tokenizer: Tokenizer, rng: np.random.Generator) -> None:
    """A random output behind a random prompt, with stop strings that its text has, or parts of which it has."""
    ids = random_tokens(tokenizer, rng, int(rng.integers(1, 9)))
    cut, skips, includes = int(rng.integers(len(ids) + 1) * rng.integers(2)), bool(rng.integers(2)), rng.random() < 0.3
    prompt, tokens = ids[:cut], ids[cut:]
    whole = text_behind(tokenizer, prompt, tokens, skips)
    begin = rng.integers(len(whole) + 1, size=3)
    sizes = rng.integers(1, 6, size=3)
    parts = (whole[i : i + size] for i, size in zip(begin, sizes, strict=True))
    stop = tuple(part + "x" * int(rng.random() < 0.4) for part in parts if part) or ("a",)
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes, skip_special_tokens=skips, max_tokens=999)
    output, pieces, count = OutputText(tokenizer, params, prompt), "", 0
    while count < len(tokens) and not output.is_stopped:
        output.push(tokens[count])
        pieces, count = pieces + output.take(), count + 1
    output.finish()
    pieces += output.take()
    end = naive_end(text_behind(tokenizer, prompt, tokens[:count], skips), stop, includes=includes)
    assert output.is_stopped == (end is not None)
    assert pieces == output.whole(np.array(tokens[:count])), (ids, cut, stop)
    assert pieces == naive_end(whole, stop, includes=includes) if output.is_stopped else pieces == whole, (ids, cut)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_ends_where_its_first_stop_string_does_however_it_came(kind: str) -> None:
    """With every kind of tokenizer, wherever pieces end: the whole text is cut as if it came a character at a time."""
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(100):
        check_stops(tokenizer_of(kind), rng)


@pytest.mark.sweep
def test_a_hundred_thousand_texts_end_where_their_first_stop_strings_do() -> None:
    begun = time.perf_counter()
    for i, kind in enumerate(KINDS):
        rng = np.random.default_rng(2000 + i)
        for _ in range(-(-NUM_CASES // len(KINDS))):
            check_stops(tokenizer_of(kind), rng)
    print(f"{NUM_CASES:,} outputs of {len(KINDS)} tokenizers, seeds 2000 on: {time.perf_counter() - begun:.0f} s")


def test_a_stop_string_within_one_token_cuts_what_is_behind_it() -> None:
    class Words(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(["one ", "two three ", "four"][token] for token in token_ids)

    for includes, expected in ((False, "one two "), (True, "one two three")):
        output = OutputText(Words(), SamplingParams(stop="three", include_stop_str_in_output=includes))
        assert stops(output, [0, 1]) == [False, True]
        assert output.whole(np.array([0, 1])) == expected


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop="abc"))
    seen = []
    for token in b"xababd":
        assert stops(output, [token]) == [False]
        seen.append(output.take())
    assert seen == ["x", "", "", "ab", "", "abd"]


def test_no_stop_string_ends_a_request_before_min_tokens() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop="a", min_tokens=4))
    assert stops(output, b"abbbb") == [False] * 5
    output = OutputText(ByteTokenizer(), SamplingParams(stop="bb", min_tokens=4))
    assert stops(output, b"bbbb") == [False, False, False, True]
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


def engine_of(kind: str, **settings: Any) -> tuple[LLMEngine, list[list[int]]]:
    """An engine whose model writes anything of a kind of tokenizer, and prompts of its tokens."""
    tokenizer, rng = tokenizer_of(kind), np.random.default_rng(KINDS.index(kind))
    model = dataclasses.replace(loaded("demo"), tokenizer=tokenizer)
    config = base_config("demo", **settings)
    engine = LLMEngine(model, config, like=base_engine("demo", config.num_blocks or 0))
    return engine, [[0, *random_tokens(tokenizer, rng, 4)] for _ in range(4)]


@pytest.mark.parametrize(
    "kind",
    ["byte level", "byte fallback (Llama 2)", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in KINDS[3:])],
)
def test_what_an_engine_streams_is_the_text_behind_the_prompt(kind: str) -> None:
    """Of all samples, in few blocks, so that some are preempted; and the same by `generate`, with stop strings too."""
    tokenizer = tokenizer_of(kind)
    skips = bool(KINDS.index(kind) % 2)
    common: dict[str, Any] = {"n": 2, "max_tokens": 24, "temperature": 5.0, "seed": 1, "skip_special_tokens": skips}
    params = SamplingParams(allowed_token_ids=tuple(range(tokenizer.vocab_size)), ignore_eos=True, **common)
    engine, prompts = engine_of(kind, num_blocks=162, watermark=0.0, async_scheduling=True)
    streamed: dict[str, str] = {}
    results = []
    for output in engine.stream(prompts, params):
        assert output.text is not None
        streamed[output.request_id] = streamed.get(output.request_id, "") + output.text
        if output.result is not None:
            results.append(output.result)
    assert len(results) == 8
    assert sum(stats.num_preemptions for stats in engine.step_stats)
    texts = {}
    for result in results:
        prompt, tokens = result.prompt_token_ids.tolist(), result.output_token_ids.tolist()
        text = text_behind(tokenizer, prompt, tokens, skips)
        assert streamed[result.request_id] == result.text == texts.setdefault(tuple(tokens), text) == text
    generated = engine.generate(prompts, params)
    assert [one.text for one in generated] == [texts[tuple(one.output_token_ids.tolist())] for one in generated]
    stops = [((text := one.text or "")[len(text) // 2 :][:3] or "a", text[-2:] + "a") for one in generated[::2]]
    cut = engine.generate(prompts, [dataclasses.replace(params, n=1, stop=stop) for stop in stops])
    for one, whole, stop in zip(cut, generated[::2], stops, strict=True):
        end = naive_end(whole.text or "", stop, includes=False)
        assert one.text == (whole.text if end is None else end)
        assert one.finish_reason is (FinishReason.LENGTH if end is None else FinishReason.STOP)
    assert_no_leak(engine)


def test_prompt_and_text_are_the_decoding_of_all() -> None:
    """Where the prompt is text that its tokens decode to, also with a space between prompt and output."""
    for kind in ("byte level", "byte fallback (Llama 2)", "byte fallback (Gemma)", "Unigram"):
        tokenizer = tokenizer_of(kind)
        for prompt, tokens in (("hello", ["▁w", "Ġa"]), ("a b", ["▁", "Ġ", "a"]), ("中", ["a"])):
            ids = [found for token in tokens if (found := tokenizer._backend.token_to_id(token)) is not None]
            output = OutputText(tokenizer, SamplingParams(), tokenizer.encode(prompt))
            text = output.whole(np.array(ids))
            assert prompt + text == tokenizer.decode([*tokenizer.encode(prompt), *ids])
            assert text.startswith(" ") == (prompt != "中")


def test_text_completes_a_character_that_the_prompt_begins() -> None:
    tokenizer = tokenizer_of("byte fallback (Llama 2)")
    first, *rest = (tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "中".encode())
    assert tokenizer.decode([first]) == "\ufffd"
    assert OutputText(tokenizer, SamplingParams(), [first]).whole(np.array(rest)) == "中"
    assert OutputText(tokenizer, SamplingParams(), [first]).whole(np.array(rest[:1])) == "\ufffd"


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing() -> None:
    output = OutputText(ByteTokenizer(), SamplingParams(stop="ab"), list(b"xa"))
    assert stops(output, b"bab") == [False, False, True]
    assert output.whole(np.array(list(b"bab"))) == "b"
