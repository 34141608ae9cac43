"""Text of many running requests on one terminal: in the order of the prompts, the first unfinished one live.

Flow:    TokenOutput -> [OrderedTextPrinter] -> stdout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from kvjax.cli.generate.prompts import NamedPrompt

PROMPT_TAIL_CHARACTERS = 240


class OrderedTextPrinter:
    """Keeps the text of every request, and prints it where `out` is given. `texts` holds it by name."""

    def __init__(self, prompts: Sequence[NamedPrompt], out: TextIO | None) -> None:
        self.texts = {prompt.name: "" for prompt in prompts}
        self._ended: set[str] = set()
        self._queue = list(prompts)  # prompts whose text is not printed to its end, in order
        self._num_printed = 0  # characters of the first one's text
        self._out = out
        self._open_turn()

    def push(self, name: str, piece: str) -> None:
        """Text that a token of request `name` completes."""
        self.texts[name] += piece
        self._print_ready()

    def end(self, name: str, text: str) -> None:
        """Request `name` gets no more tokens; its whole text, which begins with the pieces."""
        self.texts[name] = text
        self._ended.add(name)
        self._print_ready()

    def _print_ready(self) -> None:
        while self._queue:
            name = self._queue[0].name
            self._write(self.texts[name][self._num_printed :])
            self._num_printed = len(self.texts[name])
            if name not in self._ended:
                return
            self._write("\n\n")
            self._queue.pop(0)
            self._open_turn()

    def _open_turn(self) -> None:
        self._num_printed = 0
        if self._queue:
            prompt = self._queue[0]
            self._write(f"--- {prompt.name} {'-' * max(4, 70 - len(prompt.name))}\n{prompt_tail(prompt.text)}")

    def _write(self, text: str) -> None:
        if self._out is not None and text:
            self._out.write(text)
            self._out.flush()


def prompt_tail(text: str) -> str:
    """The end of a prompt that is too long to show, cut at a line or a word."""
    if len(text) <= PROMPT_TAIL_CHARACTERS:
        return text
    tail = text[-PROMPT_TAIL_CHARACTERS:]
    for separator in ("\n\n", "\n", " "):
        if separator in tail[:-1]:
            return "[...] " + tail.split(separator, maxsplit=1)[1].lstrip()
    return "[...] " + tail
