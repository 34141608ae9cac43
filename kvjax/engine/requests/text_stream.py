"""Text of a token stream, as it comes: the pieces are the text of all tokens, and none is taken back.

Flow:    output tokens -> [TextStream.push] -> text that is certain

A token may end inside a character, and some tokenizers give tokens their text only in sight of those behind them. A
tokenizer knows which (`is_open`), and text up to such a token is held back. What is certain is decoded from a short
tail, which begins before the last tokens whose text went out:

    tail        at least 4 tokens that have a part in the text, the last not open: 4 bytes, so a whole character
    held back   a replacement mark at the end, of which at most 3 bytes are known; byte tokens in a row, up to the
                first token that is none; with a decoder that is not known, everything

The text of an output is what the decoding of prompt and output has behind that of the prompt alone. Where the prompt
ends inside a character, the output completes it: its text begins where the two decodings begin to differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 4  # that the tail has at least in front of new ones
MAX_TAIL = 8  # tokens whose text is out, before the tail is cut


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of `text`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`."""

    def is_open(self, token_id: int, *, skip_special_tokens: bool = True) -> bool | None:
        """Whether tokens behind it may change the text up to this one; None: it has no part in any text.

        A token that ends inside a character need not be open: the text's last mark shows it.
        """


class TextStream:
    """Text of one request's output; one instance per request. Costs the decoding of a few tokens per push."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """`context` is the end of the prompt: `text_context`."""
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._tail = list(context)
        self._known = self._text()  # of the tail: the prompt's at first, then what went out

    def push(self, token_id: int) -> str:
        """Text that the next token makes certain."""
        is_open = self._tokenizer.is_open(token_id, skip_special_tokens=self._skips)
        if is_open is not None:
            self._tail.append(token_id)
        if is_open is not False:
            return ""
        text = self._certain_text()
        piece = self._take(text)
        if len(self._tail) > MAX_TAIL:
            self._tail = self._tail[-CONTEXT_TOKENS:]
            self._known = self._certain_text() + self._known[len(text) :]
        return piece

    def finish(self, token_ids: Iterable[int] = ()) -> str:
        """What is still held back, and the text of the last tokens. Nothing comes behind them."""
        self._tail.extend(token_ids)
        return self._take(self._text())

    def _take(self, text: str) -> str:
        """What of the tail's text is new."""
        known = self._known
        start = len(known) if text.startswith(known) else _common_length(known, text)
        if start < len(text):
            self._known = text
        return text[start:]

    def _certain_text(self) -> str:
        return self._text().removesuffix(REPLACEMENT)

    def _text(self) -> str:
        return self._tokenizer.decode(self._tail, skip_special_tokens=self._skips)


def _common_length(a: str, b: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def text_context(
    tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True
) -> list[int]:  # a few of `token_ids`
    """The tokens at the end of a prompt that the text behind it depends on."""
    context: list[int] = []
    num_tokens = 0  # from the last one on that is not open
    for token_id in map(int, reversed(token_ids)):
        is_open = tokenizer.is_open(token_id, skip_special_tokens=skip_special_tokens)
        if is_open is None:
            continue
        context.append(token_id)
        num_tokens += bool(num_tokens) or not is_open
        if num_tokens == CONTEXT_TOKENS:
            break
    return context[::-1]


__all__ = ["REPLACEMENT", "TextStream", "Tokenizer", "text_context"]
