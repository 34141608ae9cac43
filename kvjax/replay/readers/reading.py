"""How to read a trace, where a file does not say, and what was assumed.

Flow:    command line -> [TraceReading] -> readers -> requests, what was assumed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvjax.replay.readers.source import Item
from kvjax.replay.requests.trace import TraceRequest

DEFAULT_USERS = 16
ASSUMED_OUTPUT = 256  # tokens of an answer that a file does not tell; vLLM's bench takes as many


class TextEncoder(Protocol):
    """What cuts texts into tokens; kvjax.models.Tokenizer is one."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids."""


@dataclass(frozen=True)
class TraceReading:
    """What a file may not say itself. None: its form's rule."""

    hash_block_size: int | None = None  # tokens of a hash id
    time_unit: str | None = None  # of timestamps, ms or s
    users: int | None = None  # sessions at once, where a file has sessions in place of times
    tokenizer: TextEncoder | None = None  # of texts

    @property
    def num_users(self) -> int:
        """Sessions at once."""
        return self.users or DEFAULT_USERS

    @property
    def users_note(self) -> str:
        """The same in words."""
        return f"{self.num_users} users at once{'' if self.users else ' unless --users says otherwise'}"


AS_IT_SAYS = TraceReading()


@dataclass(frozen=True)
class TraceForm:
    """A form of trace files: what it is called, how it looks, and its reader."""

    name: str
    look: str  # the beginning of a file
    options: tuple[str, ...]  # of TraceReading, that it takes
    matches: Callable[[frozenset[str]], bool]  # by the names of its first row
    read: Callable[[Iterator[Item], int | None, TraceReading], tuple[list[TraceRequest], list[str]]]


__all__ = ["ASSUMED_OUTPUT", "AS_IT_SAYS", "DEFAULT_USERS", "TextEncoder", "TraceForm", "TraceReading"]
