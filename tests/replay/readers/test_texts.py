"""Conversations and prompts: an answer is a request, and what prompts share is what their texts share."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from tests.replay.readers.forms import FORMS, ROLES, conversations, prompts
from tests.replay.readers.laws import num_shared, read, shared_tokens


def cut_by_bytes(text: str) -> list[bytes]:
    encoded = text.encode()
    return [encoded[start : start + 4] for start in range(0, len(encoded), 4)]


class Words:
    """A tokenizer with a token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def turns_of(found: list[dict], key: str, encode) -> list[tuple[int, list, int | None]]:
    """By definition: conversation, tokens of the prompt, tokens of the answer (None: there is none)."""
    who, what, _, answers = ROLES[key]
    turns = []
    for number, conversation in enumerate(found):
        said: list = []
        for message in conversation[key]:
            tokens = encode(message[what])
            if message[who] == answers and said:
                turns.append((number, list(said), len(tokens)))
            said += tokens
        if conversation[key] and conversation[key][-1][who] != answers and said:
            turns.append((number, said, None))
    return turns


@pytest.mark.parametrize("tokenizer", [None, Words()], ids=["bytes", "tokenizer"])
@pytest.mark.parametrize("key", ROLES)
@pytest.mark.parametrize("seed", range(20))
def test_turns_repeat_their_conversation_and_share_with_others(seed, key, tokenizer, tmp_path: Path) -> None:
    """One user, so that turns come in order. Two conversations share whole blocks of 16 of what they have in common."""
    found = conversations(np.random.default_rng(seed), key)
    expected = turns_of(found, key, cut_by_bytes if tokenizer is None else tokenizer.encode)
    requests, told = read(tmp_path / "t", json.dumps(found), users=1, tokenizer=tokenizer)
    assert ("a token for 4 bytes" in told) == (tokenizer is None)
    assert [(len(said), 256 if num_out is None else num_out) for _, said, num_out in expected] == [
        (request.input_length, request.output_length) for request in requests
    ]
    for (a, (of_a, said_a, _)), (b, (of_b, said_b, _)) in combinations(zip(requests, expected, strict=True), 2):
        common = num_shared(said_a, said_b)
        if of_a == of_b:
            assert shared_tokens(a, b) == common == min(len(said_a), len(said_b))
        else:
            assert common // 16 * 16 <= shared_tokens(a, b) <= common


@pytest.mark.parametrize("seed", range(20))
def test_prompts_have_the_answers_that_are_asked_for(seed: int, tmp_path: Path) -> None:
    text = prompts(np.random.default_rng(seed))
    rows = [json.loads(line) for line in text.splitlines()]
    requests, _ = read(tmp_path / "t", text, users=1)
    assert [(len(cut_by_bytes(row["prompt"])), row["output_tokens"]) for row in rows] == [
        (request.input_length, request.output_length) for request in requests
    ]
    bare, told = read(tmp_path / "t", "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows), users=1)
    assert {request.output_length for request in bare} == {256}
    assert "256 tokens for an answer that is not there" in told


@pytest.mark.parametrize("key", ["conversation", "messages", "conversations"])
def test_what_else_a_conversation_says_is_ignored(key: str, tmp_path: Path) -> None:
    """As LMSYS-Chat-1M and WildChat do: when, by which model, how many turns."""
    messages = [
        {"role": "user", "content": "hi", "country": "x"},
        {"role": "assistant", "content": "yes", "toxic": False},
    ]
    others = {"conversation_id": "a1", "model": "m", "timestamp": "2023-04-09T00:02:53", "turn": 1, "redacted": False}
    requests, told = read(tmp_path / "t", json.dumps(others | {key: messages}) + "\n")
    assert ": conversations (ShareGPT, chat messages), 1 request; " in told
    assert [(request.input_length, request.output_length) for request in requests] == [(1, 1)]


def test_contents_may_be_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "how are "}, {"type": "text", "text": "you?"}]
    whole = [{"messages": [{"role": "user", "content": "how are you?"}, {"role": "assistant", "content": "fine"}]}]
    in_parts = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "fine"}]}]
    assert read(tmp_path / "t", json.dumps(whole))[0] == read(tmp_path / "t", json.dumps(in_parts))[0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"messages": "hello"}, "item 1: expected a list of messages under conversations, .* got hello"),
        ({"messages": ["hello"]}, "item 1, message 0: expected an object of role and content, got hello"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "item 1, message 0: expected a role of ai, .* wizard"),
        ({"messages": [{"content": "a"}]}, "item 1, message 0: expected a role of ai, .* got None"),
        (
            {"messages": [{"role": ["user"], "content": "a"}]},
            "item 1, message 0: expected a role of ai, .* got .'user'",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "item 1, message 0: expected text, got None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "item 1, message 0: expected text, got"),
        ({"prompt": "a"}, "item 1: expected a list of messages under conversations, .* got None"),
    ],
)
def test_bad_messages_are_refused_with_their_place(item: dict, message: str, tmp_path: Path) -> None:
    good = json.loads(FORMS["chat_messages"](np.random.default_rng(0)).splitlines()[-1])
    with pytest.raises(TraceError, match=r"t: " + message):
        read(tmp_path / "t", json.dumps([good, item]))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": "a"}, "expected the key 'prompt', got .'text'."),
        ({"prompt": ["a"]}, "expected text, got .'a'."),
        ({"prompt": "a", "output_tokens": 0.5}, "expected output_tokens to be an integer >= 0, got 0.5"),
    ],
)
def test_bad_prompts_are_refused_with_their_place(item: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t:2: " + message):
        read(tmp_path / "t", json.dumps({"prompt": "good"}) + "\n" + json.dumps(item))
