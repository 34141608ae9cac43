"""Text of one request's output: pieces as tokens come, the end at a stop string, the whole.

Flow:    output token -> [OutputText.push] -> piece of StepOutput.text, the request's end -> GenerationResult.text

Only requests with stop strings, or whose text is asked for as it comes, are looked at token by token; of the others the
text is decoded once, at the end. A stop string may begin in one token and end in another: text that may be the
beginning of one is held back from the pieces until that is known.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from kvjax.engine.sampling_params import SamplingParams
from kvjax.engine.text_stream import TextStream, Tokenizer


class OutputText:
    """One request's; owned by the engine's thread. A token costs the decoding of a few, and a search of its text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.is_followed = bool(params.stop_strings) or params.stream_text  # token by token
        self._params = params
        self._tokenizer = tokenizer if params.skip_special_tokens else _WithSpecialTokens(tokenizer)
        self._stream = TextStream(self._tokenizer)
        self._num_tokens = 0
        self._text = ""
        self._num_taken = 0  # characters that went out in pieces
        self.has_ended = False  # by a stop string, or finished

    def restarted(self) -> OutputText:
        """The same before its first token."""
        other = copy.copy(self)
        other._stream = TextStream(self._tokenizer)
        other._num_tokens = other._num_taken = 0
        other._text, other.has_ended = "", False
        return other

    def push(self, token_id: int) -> bool:
        """Takes the newest token; whether the text ends with it, as it contains a stop string (`has_ended`).

        Tokens before the `min_tokens`-th complete no stop string.
        """
        self._num_tokens += 1
        length = len(self._text)
        self._text += self._stream.push([token_id])
        if self._num_tokens < self._params.min_tokens:
            return False
        end = self._find_stop(length)
        if end is None:
            return False
        self._text = self._text[:end]
        self.has_ended = True
        return True

    def take(self) -> str:
        """Text that is certain and was not taken before."""
        end = len(self._text) - self._num_held_back()
        piece = self._text[self._num_taken : end]
        self._num_taken = end
        return piece

    def finish(self) -> None:
        """No token comes any more: nothing is held back, half characters included."""
        if not self.has_ended:
            self._text += self._stream.finish()
            self.has_ended = True

    def whole(self, token_ids: np.ndarray) -> str:  # int32[num_output_tokens], all of the request's
        """The text of an ended request."""
        if not self.is_followed:
            return self._tokenizer.decode(token_ids.tolist())
        self.finish()
        return self._text

    def _find_stop(self, length: int) -> int | None:
        """Where the text ends, by the first stop string that is not within its first `length` characters."""
        found = [
            (start, len(stop))
            for stop in self._params.stop_strings
            if (start := self._text.find(stop, max(length - len(stop) + 1, 0))) >= 0
        ]
        if not found:
            return None
        start, size = min(found)
        return start + size if self._params.include_stop_str_in_output else start

    def _num_held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.has_ended or self._params.include_stop_str_in_output:
            return 0
        text, longest = self._text, 0
        for stop in self._params.stop_strings:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if text.endswith(stop[:size])), longest)
        return longest


class _WithSpecialTokens:
    """A tokenizer that leaves no token out of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # type: ignore[call-arg]


__all__ = ["OutputText"]
