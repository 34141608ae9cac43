"""Text of a token stream, as it comes: no half characters, nothing printed twice.

Flow:    output tokens -> [TextStream.push] -> printable text

A token may end inside a character, and some tokenizers give a token's text only in sight of its neighbours. So text
is decoded from a short tail that starts before the last tokens printed, and held back while it ends in the
replacement character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 4  # printed tokens that stay in the decoded tail


class Tokenizer(Protocol):
    """What the engine's tools need of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of `text`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""


class TextStream:
    """Text of one request's output; one instance per request. Costs the decoding of a few tokens per push."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []  # the tail: printed context, then tokens not printed yet
        self._num_printed = 0  # leading tokens of the tail that are printed

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that `token_ids` complete."""
        self._token_ids.extend(int(token) for token in token_ids)
        text = self._unprinted_text()
        if text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is still held back, replacement characters included."""
        return self._take(self._unprinted_text())

    def _unprinted_text(self) -> str:
        printed = self._tokenizer.decode(self._token_ids[: self._num_printed])
        return self._tokenizer.decode(self._token_ids)[len(printed) :]

    def _take(self, text: str) -> str:
        self._token_ids = self._token_ids[-CONTEXT_TOKENS:]
        self._num_printed = len(self._token_ids)
        return text
