"""Numbers, byte sizes and tables as text, and byte sizes back from text.

Flow:    reports -> [format_bytes, count_of, align_table] -> terminal; [parse_bytes, parse_count] -> numbers
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LETTERS = {name[0]: size for name, size in _BINARY.items()}
_UNITS = {"B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY, **_LETTERS}
_COUNTS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_SIZE = re.compile(r"(?P<number>\d[\d_,]*(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as "56GiB", "80 GB", "1.5TiB" or "1_000_000"; a fraction of a byte is dropped.

    A letter alone is the binary unit, as in GNU's tools: "80G" is "80GiB".

    Raises:
        ValueError: the text is no size, or its unit is none of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, K, M, G, T.
    """
    amount = _amount(str(text).strip(), _UNITS, default="B")
    if amount is None:
        raise ValueError(
            f"expected a size in bytes such as 60129542144, 56GiB (binary) or 80GB (decimal), got {str(text)!r}"
        )
    return int(amount)


def parse_count(text: str) -> int:
    """An integer such as "32768", "32,768", "32k" (32,000) or "32K" (32,768), as vLLM's command line reads them.

    Raises:
        ValueError: the text is no whole number.
    """
    value = _amount(text.strip().removeprefix("-"), _COUNTS, default="")
    if value is None:
        raise ValueError(f"expected an integer such as 32768, 32k (32,000) or 32K (32,768), got {text!r}")
    if value.denominator != 1:
        raise ValueError(f"expected a whole number, got {text!r}")
    return -int(value) if text.strip().startswith("-") else int(value)


def _amount(text: str, units: Mapping[str, int], default: str) -> Fraction | None:
    """A number times its unit, that of `default` where it has none; None: it is no such text."""
    match = _SIZE.fullmatch(text)
    factor = None if match is None else units.get(match["unit"] or default)
    return None if match is None or factor is None else Fraction(re.sub("[_,]", "", match["number"])) * factor


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` with a binary unit and two decimals, such as "56.00 GiB"; plain below 1 KiB."""
    for unit, size in reversed(_BINARY.items()):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"


def count_of(number: int, noun: str) -> str:
    """A number of things, such as "1 request" or "1,000 requests"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error: what of the known is most like the given, whatever its case; empty where nothing is."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def align_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Columns under their headers, right-aligned but for the indices in `left`, with a rule below the header."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(_align(line, widths, left) for line in lines)


def _align(line: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = (
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
