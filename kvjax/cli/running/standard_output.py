"""What commands print to, which may be a pipe whose reader leaves.

Flow:    print -> [StandardOutput] -> terminal, file or pipe
"""

from __future__ import annotations

import os
from typing import Any, TextIO

from kvjax.cli.running.output_files import STANDARD_OUTPUT, writing


class StandardOutput:
    """A text stream whose errors name it. Where it `goes_on`, a reader that leaves ends the printing, not the work."""

    def __init__(self, stream: TextIO, *, goes_on: bool) -> None:
        self._stream = stream
        self._goes_on = goes_on

    def write(self, text: str) -> int:
        """As `TextIO.write`.

        Raises:
            BrokenPipeError: the reader is gone, and the work need not go on.
            OSError: it cannot be written.
        """
        return self._done(self._stream.write, text) or len(text)

    def flush(self) -> None:
        """Likewise."""
        self._done(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _done(self, call: Any, *args: Any) -> Any:
        try:
            with writing(STANDARD_OUTPUT):
                return call(*args)
        except BrokenPipeError:
            if not self._goes_on:
                raise
            drop_output(self._stream)


def drop_output(stream: TextIO) -> None:
    """Nobody reads what the stream still holds and is given."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
