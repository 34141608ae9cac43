"""Values that a caller gave, as plain numbers, or one error that says what was expected and what came.

Flow:    Request, SamplingParams, add_request -> [as_count, as_number, as_flag, as_ids, as_text] -> plain values

Nothing else reaches a scheduler or an engine's thread: what int32, float32 or UTF-8 cannot hold is refused here.
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

MAX_COUNT = int(np.iinfo(np.int32).max)
MAX_IDS = 1 << 20  # of one list of token ids: more than any vocabulary has
MAX_SHOWN = 80  # characters of a value in a message


def as_count(name: str, value: Any, least: int = 0, most: int = MAX_COUNT, note: str = "") -> int:
    """`value` as an integer in [least, most]. Booleans are none.

    Raises:
        ValueError: it is not.
    """
    number = _index(value)
    if number is None or number < least:
        raise ValueError(f"expected {name} >= {least}{note}, got {shown(value)}")
    if number > most:
        raise ValueError(f"expected {name} of at most {most}{note}, got {shown(value)}")
    return number


def as_number(value: Any, expected: str) -> float:
    """`value` as a finite number that float32 holds: what is closer to 0 becomes 0. `expected` says which there are.

    Raises:
        ValueError: it is none.
    """
    number = math.nan
    if not isinstance(value, str | bytes | bytearray | bool | np.bool_) and not np.ndim(value):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"expected {expected}, got {shown(value)}")
    return number if abs(number) >= float(np.finfo(np.float32).tiny) else 0.0


def as_flag(name: str, value: Any) -> bool:
    """`value` as True or False.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"expected {name} as True or False, got {shown(value)}")
    return bool(value)


def as_ids(name: str, values: Any) -> tuple[int, ...]:
    """`values` as token ids, in their order; which of them a vocabulary has is not checked.

    Raises:
        ValueError: they are not integers of 32 bits, or more than any vocabulary has.
    """
    expected = f"{name} as token ids, integers of 32 bits"
    ids = []
    for given in as_items(values, expected, MAX_IDS):
        number = _index(given)
        if number is None or abs(number) > MAX_COUNT:
            raise ValueError(f"expected {expected}, got {shown(given)}")
        ids.append(number)
    return tuple(ids)


def as_items(values: Any, expected: str, most: int) -> tuple[Any, ...]:
    """The items of `values`, of which no more are read than may be. `expected` says what they are.

    Raises:
        ValueError: there are more, or it has no items.
    """
    try:
        items = tuple(islice(values, most + 1))
    except TypeError:
        raise ValueError(f"expected {expected}, got {shown(values)}") from None
    if len(items) > most:
        raise ValueError(f"expected {expected}, at most {most}, got more")
    return items


def as_text(name: str, value: Any) -> str:
    """`value` as text that has a UTF-8 form.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected {name} as text, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected {name} as text that UTF-8 can write, got half a pair: {error}; "
            "text.encode(errors='replace').decode() has none"
        ) from None
    return str(value)


def shown(value: Any) -> str:
    """A value in a message, cut short."""
    try:
        text = repr(value) if not isinstance(value, np.generic) else str(value)
    except Exception:  # a number of too many digits, or code of the caller's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _index(value: Any) -> int | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


__all__ = ["MAX_COUNT", "as_count", "as_flag", "as_ids", "as_items", "as_number", "as_text", "shown"]
