"""Laws of streamed text, for every kind of tokenizer: the pieces are the text, at once, and for a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvjax.engine.requests.text_stream import CONTEXT_TOKENS, MAX_TAIL, REPLACEMENT, TextStream, text_context
from kvjax.models.open_tokens import OpenTokens
from kvjax.models.tokenizer import Tokenizer
from tests.engine.requests.tokenizer_kinds import KINDS, STREAMED_KINDS, UNKNOWN, random_tokens, tokenizer_of

NUM_CASES = 100_000


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skips: bool) -> str:
    """The oracle: the decoding of all, from where it differs from the prompt's."""
    before = tokenizer.decode(prompt, skip_special_tokens=skips)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skips)
    same = 0
    while same < min(len(before), len(whole)) and before[same] == whole[same]:
        same += 1
    return whole[same:]


def start(tokenizer: Tokenizer, prompt: Sequence[int], skips: bool) -> TextStream:
    context = text_context(tokenizer, prompt, skip_special_tokens=skips)
    return TextStream(tokenizer, context, skip_special_tokens=skips)


def check_one(tokenizer: Tokenizer, rng: np.random.Generator) -> None:
    """Streams a random string behind a random prompt, to its end and to a random token before."""
    ids = random_tokens(tokenizer, rng, int(rng.integers(1, 9)))
    skips = bool(rng.integers(2))
    cut = int(rng.integers(len(ids) + 1)) * int(rng.integers(2))
    prompt, output = ids[:cut], ids[cut:]
    whole = text_behind(tokenizer, prompt, output, skips)
    stream, pieces = start(tokenizer, prompt, skips), ""
    stop = int(rng.integers(len(output) + 1))
    for token in output[:stop]:
        pieces += stream.push(token)
    assert whole.startswith(pieces), (ids, cut, stop, skips)
    begun = start(tokenizer, prompt, skips)
    shown = "".join(begun.push(token) for token in output[:stop])
    assert shown + begun.finish() == text_behind(tokenizer, prompt, output[:stop], skips), (ids, cut, stop, skips)
    for token in output[stop:]:
        pieces += stream.push(token)
    assert pieces + stream.finish() == whole, (ids, cut, skips)
    assert start(tokenizer, prompt, skips).finish(output) == whole, (ids, cut, skips)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_decoding_of_all_and_none_is_taken_back(kind: str) -> None:
    """At any token the pieces begin every text that may follow, and with what is held back they are the text so far."""
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(150):
        check_one(tokenizer_of(kind), rng)


@pytest.mark.sweep
def test_pieces_of_a_hundred_thousand_strings_join() -> None:
    begun = time.perf_counter()
    for i, kind in enumerate(KINDS):
        rng = np.random.default_rng(1000 + i)
        for _ in range(-(-NUM_CASES // len(KINDS))):
            check_one(tokenizer_of(kind), rng)
    print(f"{NUM_CASES:,} strings of {len(KINDS)} tokenizers, seeds 1000 on: {time.perf_counter() - begun:.0f} s")


@pytest.mark.parametrize("kind", STREAMED_KINDS)
def test_behind_a_token_that_is_not_open_all_text_is_out_but_a_last_mark(kind: str) -> None:
    tokenizer, rng = tokenizer_of(kind), np.random.default_rng(7)
    num_closed = 0
    for _ in range(40):
        output = random_tokens(tokenizer, rng, 6)
        stream, pieces = TextStream(tokenizer), ""
        for i, token in enumerate(output, start=1):
            pieces += stream.push(token)
            if tokenizer.is_open(token) is False:
                num_closed += 1
                assert pieces == tokenizer.decode(output[:i]).removesuffix(REPLACEMENT)
    assert num_closed > 200


class Counting:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.counts: list[int] = []

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def is_open(self, token_id: int, *, skip_special_tokens: bool = True) -> bool | None:
        return self.tokenizer.is_open(token_id, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.counts.append(len(token_ids))
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_decoding_of_a_few_however_long_the_stream(kind: str) -> None:
    """A token is decoded for what it completes, and with the tail at most once for each of some tokens behind it.

    Only what is held back, in byte tokens up to the first token that is none, is decoded when that comes.
    """
    tokenizer = Counting(tokenizer_of(kind))
    mixed, size = random_tokens(tokenizer.tokenizer, np.random.default_rng(1), 900), tokenizer.tokenizer.vocab_size
    special = tokenizer.tokenizer.encode("<s>")[-1]
    for output in (mixed, [size - 1] * 3000, [special] * 3000, [size] * 3000):
        tokenizer.counts = []
        stream = TextStream(tokenizer)
        for token in output:
            stream.push(token)
        assert sum(tokenizer.counts) <= (MAX_TAIL + 2 + CONTEXT_TOKENS) * len(output)
        assert len(stream._tail) <= (MAX_TAIL + 20 if kind in STREAMED_KINDS else len(output))


def test_an_endless_run_of_bytes_is_decoded_once() -> None:
    """Whether they are UTF-8, half a character or none: a byte behind them could make marks of all of them."""
    for kind in ("byte fallback (Llama 2)", "Unigram with byte fallback"):
        tokenizer = Counting(tokenizer_of(kind))
        to_id = tokenizer.tokenizer._backend.token_to_id
        output = [to_id(f"<0x{byte:02X}>") for byte in "中文".encode() * 500]
        stream = TextStream(tokenizer)
        tokenizer.counts = []
        assert not any(map(stream.push, output))
        assert tokenizer.counts == []
        assert stream.push(to_id("▁w")) == "中文" * 500 + " w"
        assert stream.push(to_id("a")) == "a"
        assert sum(tokenizer.counts) < 3 * len(output)


def test_bytes_that_never_end_a_character_come_out_as_marks_but_the_last() -> None:
    """Of a byte-level tokenizer: at most three bytes are unknown."""
    tokenizer = Counting(tokenizer_of("byte level"))
    half = tokenizer.tokenizer.encode("中")[0]
    stream = TextStream(tokenizer)
    assert [stream.push(half) for _ in range(1000)] == [""] + [REPLACEMENT] * 999
    assert max(tokenizer.counts) <= MAX_TAIL + 1
    assert stream.finish() == REPLACEMENT


def test_three_chinese_characters_in_bytes_and_a_word() -> None:
    tokenizer = tokenizer_of("byte fallback (Llama 2)")
    to_id = tokenizer._backend.token_to_id
    output = [*(to_id(f"<0x{byte:02X}>") for byte in "漢字仮".encode()), to_id("▁w"), to_id("</s>"), to_id("▁b")]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in output] == [""] * 9 + ["漢字仮 w", "", " b"]
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", UNKNOWN)
def test_of_a_decoder_that_is_not_known_text_comes_at_the_end(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    output = tokenizer.encode("a b hello")
    stream = TextStream(tokenizer)
    assert not any(map(stream.push, output))
    assert stream.finish() == tokenizer.decode(output)


def test_decoders_of_other_forms_hold_all_tokens_back() -> None:
    pattern = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}
    for decoder in ({"type": "New"}, pattern, {"type": "Strip", "content": " ", "start": 0, "stop": 1}):
        assert OpenTokens({"type": "Sequence", "decoders": [decoder]}).is_open("a")
    assert OpenTokens({"type": "ByteFallback"}).is_open("<0x+F>")
    assert not OpenTokens({"type": "ByteFallback"}).is_open("<0x0G>")


@pytest.mark.parametrize(
    ("kind", "empty"),
    [
        ("CTC", "<pad>"),
        ("WordPiece", "##"),
        ("BPE with a suffix", "</w>"),
        ("tokens without text", ""),
        ("byte level", ""),
    ],
)
@pytest.mark.parametrize("num_empty", [3, 4, 12])
def test_a_mark_that_is_held_back_outlasts_tokens_without_text(kind: str, empty: str, num_empty: int) -> None:
    tokenizer = tokenizer_of(kind)
    to_id = tokenizer._backend.token_to_id
    mark = tokenizer.encode("中")[:1] if kind == "byte level" else [to_id(REPLACEMENT)]
    for end in ([], [to_id("a")]):
        output = [*[to_id("b")] * 6, *mark, *[to_id(empty)] * num_empty, *end]
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, output)) + stream.finish() == tokenizer.decode(output)


def test_a_mark_at_the_prompts_end_is_not_said_again_however_long_it_stays_the_last() -> None:
    """CTC says a token that comes again once."""
    tokenizer = tokenizer_of("CTC")
    mark, *word = (tokenizer._backend.token_to_id(token) for token in (REPLACEMENT, "b"))
    for num_marks in (1, 5, 20):
        stream = start(tokenizer, [*word, mark], True)
        assert "".join(map(stream.push, [mark] * num_marks + word)) == "b"
