"""Exceptions planted in an engine: at calls, before or after they have done their work, and between any two lines."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvjax

PACKAGE = str(Path(kvjax.__file__).parent)
TRACED = tuple(f"{PACKAGE}/{name}/" for name in ("core", "engine"))


def plant(
    monkeypatch: pytest.MonkeyPatch, target: str, errors: Mapping[int, type[BaseException]], when: str
) -> Callable[[], int]:
    """Calls of the function at `target` raise by their numbers, counted from 0; how many have."""
    owner_name, name = target.rsplit(".", 1)
    owner = resolve(owner_name)
    function, calls, raised = getattr(owner, name), itertools.count(), []

    def failing(*args: Any, **options: Any) -> Any:
        error = errors.get(next(calls))
        if error is not None:
            raised.append(error)
            if when == "before":
                raise error("planted")
        result = function(*args, **options)
        if error is not None:
            raise error("planted")
        return result

    monkeypatch.setattr(owner, name, failing)
    return lambda: len(raised)


def resolve(name: str) -> Any:
    """A module, or a class in one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        module = ".".join(parts[:i])
        if module in sys.modules:
            found: Any = sys.modules[module]
            for part in parts[i:]:
                found = getattr(found, part)
            return found
    raise ValueError(f"expected the name of something imported, got {name}")


@contextmanager
def interrupted_at_lines(*numbers: int) -> Iterator[None]:
    """KeyboardInterrupt before the lines of those numbers, counted from 0, that core and engine run in the block."""
    lines = itertools.count()

    def at_call(frame: FrameType, event: str, arg: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(TRACED) else None

    def at_line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and next(lines) in numbers:
            raise KeyboardInterrupt
        return at_line

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)
