"""Texts: conversations, of which every answer is a request, and prompts.

Flow:    JSON list or lines -> [CONVERSATIONS, PROMPTS] -> sessions -> at_once
Source:  ShareGPT_V3 (from, value); OpenAI's chat messages (role, content), as in vLLM's multi-turn bench, LMSYS-Chat-1M
         and WildChat; the custom dataset of vLLM's bench (prompt, output_tokens)

A text's tokens are a tokenizer's, or one for each begun 4 bytes of UTF-8. Each message is cut by itself; what a chat
template would add is not counted. Equal beginnings share ids by whole blocks of 16 tokens, over all conversations; a
conversation's own turns share all that was said, answers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvjax.errors import TraceError
from kvjax.replay.readers.prefixes import Numbering
from kvjax.replay.readers.reading import ASSUMED_OUTPUT, TextEncoder, TraceForm, TraceReading
from kvjax.replay.readers.sessions import ANSWER_TOKENS_PER_S, Turn, at_once
from kvjax.replay.readers.source import Item
from kvjax.replay.readers.values import MAX_LENGTH, Columns
from kvjax.replay.requests.trace import TraceRequest

BLOCK_SIZE = 16
PAUSE_S = 30.0  # between an answer and the next turn
TOKEN_BYTES = 4  # of a token in what is compared: its id, or its bytes
ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "ai"})
OTHERS = frozenset({"human", "user", "system", "developer", "tool", "function", "observation"})
_LISTS = ("conversations", "conversation", "messages")

Message = tuple[str, str]  # who speaks, and the text


class _Texts:
    """Tokens of texts, and hash ids of what begins alike."""

    def __init__(self, tokenizer: TextEncoder | None) -> None:
        self._tokenizer = tokenizer
        self._numbering = Numbering(BLOCK_SIZE)
        self._known: dict[tuple[int, bytes], int] = {}  # id before, a block's tokens -> id

    def tokens(self, text: str) -> bytes:
        """TOKEN_BYTES of each token."""
        if self._tokenizer is not None:
            return np.array(self._tokenizer.encode(text), np.int32).tobytes()
        encoded = text.encode("utf-8", "surrogatepass")
        return encoded + bytes(-len(encoded) % TOKEN_BYTES)

    def hash_ids(self, tokens: bytes) -> tuple[int, ...]:
        """An id for each begun block."""
        step, ids, before = BLOCK_SIZE * TOKEN_BYTES, [], -1
        for start in range(0, len(tokens), step):
            key = (before, tokens[start : start + step])
            if key not in self._known:
                self._known[key] = self._numbering.fresh(1).start
            before = self._known[key]
            ids.append(before)
        return tuple(ids)

    def turns(self, messages: list[Message], last_output: int | None = None) -> list[Turn]:
        """A turn for each answer, and for what a conversation ends with, if nobody answered it."""
        parts = [self.tokens(text) for _, text in messages]
        ids = self.hash_ids(b"".join(parts))
        turns: list[Turn] = []
        num_before = 0

        def ask(num_out: int) -> None:
            if num_before:
                num_blocks = -(-num_before // BLOCK_SIZE)
                pause_s = PAUSE_S if turns else 0.0
                answer_s = num_out / ANSWER_TOKENS_PER_S
                turns.append(Turn(num_before, num_out, ids[:num_blocks], answer_s, len(turns) - 1, pause_s))

        for (speaker, _), part in zip(messages, parts, strict=True):
            num_tokens = len(part) // TOKEN_BYTES
            if speaker in ANSWERS:
                ask(num_tokens)
            num_before += num_tokens
        if messages and messages[-1][0] not in ANSWERS:
            ask(ASSUMED_OUTPUT if last_output is None else last_output)
        return turns


def _read(
    conversation_of: Callable[[Item], tuple[list[Message], int | None]],
    items: Iterator[Item],
    limit: int | None,
    reading: TraceReading,
) -> tuple[list[TraceRequest], list[str]]:
    texts = _Texts(reading.tokenizer)
    sessions = (turns for item in items if (turns := texts.turns(*conversation_of(item))))
    cut = "the tokenizer" if reading.tokenizer else f"a token for {TOKEN_BYTES} bytes unless --tokenizer says otherwise"
    notes = [
        f"{reading.users_note}, {PAUSE_S:g} s from an answer to the next turn",
        f"lengths by {cut}",
        f"{ASSUMED_OUTPUT} tokens for an answer that is not there",
    ]
    return at_once(sessions, reading.num_users, BLOCK_SIZE, limit), notes


def _conversation(item: Item) -> tuple[list[Message], None]:
    place, data = item
    messages = next((data[name] for name in _LISTS if name in data), None)
    if not isinstance(messages, list):
        raise TraceError(f"{place}: expected a list of messages under {', '.join(_LISTS)}, got {str(messages)[:40]}")
    return [_message(message, f"{place}, message {number}") for number, message in enumerate(messages)], None


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise TraceError(f"{place}: expected an object of role and content, got {str(message)[:40]}")
    speaker = message.get("from", message.get("role"))
    if not isinstance(speaker, str) or speaker not in ANSWERS | OTHERS:
        raise TraceError(f"{place}: expected a role of {', '.join(sorted(ANSWERS | OTHERS))}, got {str(speaker)[:40]}")
    return speaker, _text(message.get("value", message.get("content")), place)


def _text(content: Any, place: str) -> str:
    """A text, or the texts of its parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise TraceError(f"{place}: expected text, got {str(content)[:40]}")
    return "".join(texts)


def _prompt(item: Item) -> tuple[list[Message], int | None]:
    place, data = item
    columns = Columns.of([item], ("prompt",), ("output_tokens",))
    text = _text(data["prompt"], place)
    if data.get("output_tokens") is None:
        return [("user", text)], None
    return [("user", text)], columns.integers("output_tokens", 0, MAX_LENGTH)[0]


CONVERSATIONS = TraceForm(
    "conversations (ShareGPT, chat messages)",
    '[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...] or '
    '{"messages": [{"role": "user", "content": "..."}, ...]}',
    ("users", "tokenizer"),
    lambda names: not names.isdisjoint(_LISTS),
    partial(_read, _conversation),
)
PROMPTS = TraceForm(
    "prompts (vLLM's bench)",
    '{"prompt": "...", "output_tokens": 10}',
    ("users", "tokenizer"),
    lambda names: "prompt" in names,
    partial(_read, _prompt),
)

__all__ = ["CONVERSATIONS", "PROMPTS"]
