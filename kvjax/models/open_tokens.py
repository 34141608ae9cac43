"""Tokens whose text the tokens behind them may change: what a stream of text has to wait for.

Flow:    decoder of a tokenizer.json -> [OpenTokens] -> Tokenizer.is_open -> TextStream
Source:  the decoders of Hugging Face tokenizers (tokenizers/src/decoders)

Most decoders give each token its text in sight of the token before it, or of none. Then what is decoded stays, as more
tokens come. The others:

    ByteLevel       bytes that end inside a character become one replacement mark, and a character with more bytes
    ByteFallback    successive byte tokens are text if they are UTF-8 together, and a mark each if not
    BPEDecoder      a suffix within the last token disappears; within another it becomes a space
    no text         a token without text of its own does not say what the text before it ends with
    a fused text    what follows `Fuse` or `ByteLevel` sees the whole text, so that anything may change
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Decoders in a row that are known to keep all text in front of a token that is not open.
_STREAMED = re.compile(
    r"(Replace )*(ByteFallback )?(Replace )*((Metaspace|WordPiece) )?(Fuse (Strip )?)?"
    r"|ByteLevel (Fuse )?(Strip )?|CTC |BPEDecoder "
)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # what the library takes for a byte


class OpenTokens:
    """The open tokens of one decoder. Costs a few operations on the token's text."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:  # as in tokenizer.json; None: tokens are joined
        self._steps = list(_steps(decoder))
        names = "".join(f"{step['type']} " for step in self._steps)
        self._is_streamed = _STREAMED.fullmatch(names) is not None and all(map(_is_local, self._steps))

    def is_open(self, token: str) -> bool | None:
        """Whether tokens behind `token` may change the text up to it; None: it adds nothing, whatever is around it.

        Of a decoder that is not known every token is open. A byte-level token is not: a replacement mark at the end of
        the text shows where it may end inside a character.
        """
        if not self._is_streamed:
            return True
        for step in self._steps:
            match step["type"]:
                case "Replace":
                    token = token.replace(step["pattern"]["String"], step["content"])
                case "ByteFallback" if _BYTE.fullmatch(token):
                    return True
                case "WordPiece":
                    token = token.removeprefix(step["prefix"])
                case "CTC":
                    token = token.replace(step["pad_token"], "")
                case "BPEDecoder" if step["suffix"] in token.removesuffix(step["suffix"]):
                    return True
                case "ByteLevel" if not token:
                    return None
        return not token


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The decoders in a row that `decoder` stands for."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for one in decoder["decoders"]:
        yield from _steps(one)


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a decoder of `_STREAMED` is used as is meant there: text for text, at most a first character stripped."""
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] != "Strip" or (step["start"] <= 1 and not step["stop"])


__all__ = ["OpenTokens"]
