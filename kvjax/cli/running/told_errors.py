"""An error as one line for a person: what was expected, what came, and what may be meant.

Flow:    exception of a command -> [error_line] -> stderr
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvjax.text import did_you_mean


def error_line(error: BaseException) -> str:
    """The message on one line; that of a file that cannot be opened in our words, with a name that is like it."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, os.PathLike)):
        name = os.fspath(error.filename)
        if isinstance(error, FileNotFoundError):
            return f"expected a file that exists, got {name!r}{did_you_mean(os.path.basename(name), _beside(name))}"
        if isinstance(error, IsADirectoryError):
            return f"expected a file, got the folder {name!r}; name a file in it"
        if isinstance(error, PermissionError):
            return f"expected a file that this user may open, got {name!r}; see who owns it, and its mode"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _beside(name: str) -> list[str]:
    """What is in the folder where a file should be."""
    with suppress(OSError):
        return os.listdir(os.path.dirname(name) or ".")
    return []


__all__ = ["error_line"]
