"""Text to token ids and back, through a folder's tokenizer.json.

Flow:    text -> [Tokenizer.encode] -> ids -> engine -> ids -> [Tokenizer.decode] -> text
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import ConfigError
from kvjax.extras import require_extra
from kvjax.models.open_tokens import OpenTokens

NO_TOKENIZER = "the model has no tokenizer"
_UNREAD_FILES = ("tokenizer.model", "tiktoken.model", "spiece.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A Hugging Face fast tokenizer; whether texts begin with a special token is its post-processor's word."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        self._backend = backend
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._open_tokens = OpenTokens(decoder)
        added = backend.get_added_tokens_decoder().values()
        self._special_tokens = frozenset(token.content for token in added if token.special)
        self._is_open: dict[int, bool | None] = {}  # of tokens that were asked about
        self._special_ids: set[int] = set()  # among them

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, None where it has no tokenizer.json.

        Raises:
            MissingExtraError: there is one, but tokenizers is not installed.
            ConfigError: tokenizer.json cannot be read.
        """
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            return None
        tokenizers = require_extra("tokenizers", "hf", "a tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"{file}: expected a tokenizer, got one that cannot be read: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        return self._backend.encode(text).ids

    def encode_plain(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of `text` alone, without those that a post-processor adds; and the character where each ends."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, [end for _, end in encoding.offsets]

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return self._backend.decode([int(i) for i in token_ids], skip_special_tokens=skip_special_tokens)

    def is_open(self, token_id: int, *, skip_special_tokens: bool = True) -> bool | None:
        """Whether tokens behind it may change the text up to this one; None: it has no part in any text."""
        if token_id not in self._is_open:
            token = self._backend.id_to_token(token_id)
            self._is_open[token_id] = None if token is None else self._open_tokens.is_open(token)
            if token in self._special_tokens:
                self._special_ids.add(token_id)
        if skip_special_tokens and token_id in self._special_ids:
            return None
        return self._is_open[token_id]


def why_no_tokenizer(folder: str | Path) -> str:
    """What to tell who needs the tokenizer of a model folder that has no tokenizer.json, and how to get one."""
    unread = [name for name in _UNREAD_FILES if (Path(folder) / name).is_file()]
    if not unread:
        return f"{NO_TOKENIZER}, since its folder has no tokenizer.json"
    return (
        f"{NO_TOKENIZER}, since its folder has {', '.join(unread)} and no tokenizer.json; transformers (with "
        "sentencepiece, tiktoken) makes one: "
        f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )
