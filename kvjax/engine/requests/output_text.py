"""Text of one request's output: pieces as tokens come, the end at a stop string, the whole.

Flow:    output token -> [OutputText.push] -> piece of TokenOutput.text, the request's end -> GenerationResult.text

Only requests with stop strings, or whose text is asked for as it comes, are looked at token by token; of the others the
text is decoded once, at the end. A stop string may begin in one token and end in another: text that may be the
beginning of one is held back from the pieces until that is known. It is looked for in the output's text alone, where
that is certain (text_stream.py): not in the prompt's, and in what is held back when the last token is there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.text_stream import TextStream, Tokenizer, text_context


class OutputText:
    """One request's; owned by the engine's thread. A token costs the decoding of a few, and a search of its text."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] | np.ndarray = ()
    ) -> None:
        self.is_followed = bool(params.stop_strings) or params.stream_text  # token by token
        self._params = params
        self._tokenizer = tokenizer
        self._context = text_context(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._num_back = max((len(stop) - 1 for stop in params.stop_strings), default=0)
        self._text = io.StringIO()  # appended to in place, however long it gets
        self._length = 0
        self._num_tokens = 0
        self._num_taken = 0  # characters that went out in pieces
        self.is_stopped = False  # by a stop string
        self.has_ended = False  # so, or finished
        if self.is_followed:
            self._stream = self._new_stream()

    def restarted(self) -> OutputText:
        """The same before its first token."""
        return OutputText(self._tokenizer, self._params, self._context)

    def push(self, token_id: int) -> None:
        """Takes the newest token; `is_stopped` if the text contains a stop string with it.

        Tokens before the `min_tokens`-th complete no stop string.
        """
        self._num_tokens += 1
        self._add(self._stream.push(token_id))

    def take(self) -> str:
        """Text that is certain and was not taken before."""
        piece = self._text_from(self._num_taken)
        piece = piece[: len(piece) - self._num_held_back()]
        self._num_taken += len(piece)
        return piece

    def finish(self) -> None:
        """No token comes any more: nothing is held back, half characters included."""
        if not self.has_ended:
            self._add(self._stream.finish())
            self.has_ended = True

    def whole(self, token_ids: np.ndarray) -> str:  # int32[num_output_tokens], all of the request's
        """The text of an ended request."""
        if not self.is_followed:
            return self._new_stream().finish(token_ids.tolist())
        self.finish()
        return self._text.getvalue()

    def _new_stream(self) -> TextStream:
        return TextStream(self._tokenizer, self._context, skip_special_tokens=self._params.skip_special_tokens)

    def _add(self, piece: str) -> None:
        """Text that came with the newest token."""
        start = max(self._length - self._num_back, 0)
        self._text.seek(self._length)
        self._text.write(piece)
        self._length += len(piece)
        if self._num_tokens < self._params.min_tokens:
            return
        end = self._find_stop(self._text_from(start), self._length - len(piece) - start)
        if end is not None:
            self._length = self._text.truncate(start + end)
            self.is_stopped = self.has_ended = True

    def _text_from(self, start: int) -> str:
        self._text.seek(start)
        return self._text.read()

    def _find_stop(self, text: str, length: int) -> int | None:
        """Where the text ends, by the stop string that is complete first, but not in its first `length` characters.

        Where several are complete at once it is the longest. So the cut does not depend on how the text came in pieces.
        """
        found = [
            (start + len(stop), start)
            for stop in self._params.stop_strings
            if (start := text.find(stop, max(length - len(stop) + 1, 0))) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return end if self._params.include_stop_str_in_output else start

    def _num_held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.has_ended or self._params.include_stop_str_in_output:
            return 0
        text, longest = self._text_from(max(self._length - self._num_back, 0)), 0
        for stop in self._params.stop_strings:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if text.endswith(stop[:size])), longest)
        return longest


__all__ = ["OutputText"]
