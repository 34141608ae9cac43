"""Types of command-line arguments whose errors argparse shows beside the option's name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from math import isfinite
from typing import TypeVar

from kvjax.core.options.manager_options import AUTO
from kvjax.text import parse_bytes, parse_count

Value = TypeVar("Value")


def positive_int(text: str) -> int:
    """An integer >= 1; thousands may be grouped with `_` or `,`, or written as 32k (32,000) and 32K (32,768)."""
    return _checked(text, lambda: parse_count(text), lambda value: value >= 1, "an integer >= 1")


def non_negative_int(text: str) -> int:
    """Likewise, an integer >= 0."""
    return _checked(text, lambda: parse_count(text), lambda value: value >= 0, "an integer >= 0")


def integer(text: str) -> int:
    """Any integer."""
    return _checked(text, lambda: int(text), lambda value: True, "an integer")


def interval(text: str) -> int | str | None:
    """`auto`, an integer >= 0, or `all`: None."""
    if text in (AUTO, "all"):
        return None if text == "all" else text
    return _checked(text, lambda: parse_count(text), lambda value: value >= 0, "auto, all or an integer >= 0")


def length(text: str) -> int:
    """`auto`, which is 0, or an integer >= 1."""
    if text == AUTO:
        return 0
    return _checked(text, lambda: parse_count(text), lambda value: value >= 1, "auto or an integer >= 1")


def positive_float(text: str) -> float:
    """A finite number > 0."""
    return _checked(text, lambda: float(text), lambda value: 0 < value < float("inf"), "a number > 0")


def non_negative_float(text: str) -> float:
    """A finite number >= 0."""
    return _checked(text, lambda: float(text), lambda value: 0 <= value < float("inf"), "a number >= 0")


def number(text: str) -> float:
    """A finite number."""
    return _checked(text, lambda: float(text), isfinite, "a number")


def folder(text: str) -> str:
    """A path to a folder, which may be made yet."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text!r}")
    return text


def byte_size(text: str) -> int:
    """A size of at least a byte, with or without a unit."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size of at least 1 byte, got {text!r}")
    return size


def int_list(text: str) -> list[int]:
    """Positive integers separated by commas."""
    return [positive_int(part) for part in text.split(",")]


def _checked(text: str, parse: Callable[[], Value], accept: Callable[[Value], bool], expected: str) -> Value:
    try:
        value = parse()
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
    if not accept(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
