"""Text to token ids and back, through a folder's tokenizer.json.

Flow:    text -> [Tokenizer.encode] -> ids -> engine -> ids -> [Tokenizer.decode] -> text
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import ConfigError
from kvjax.extras import require_extra


class Tokenizer:
    """A Hugging Face fast tokenizer; whether texts begin with a special token is its post-processor's word."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        self._backend = backend

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

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return self._backend.decode([int(i) for i in token_ids], skip_special_tokens=skip_special_tokens)
