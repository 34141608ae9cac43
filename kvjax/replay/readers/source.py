"""Lines and JSON objects of a trace file, plain or gzipped, each with its place for errors.

Flow:    file -> [numbered_lines] -> sniffing -> [json_objects] -> readers
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvjax.errors import TraceError

Line = tuple[int, str]  # number from 1 and text, not blank
Item = tuple[str, dict[str, Any]]  # place and object
_GZIP = b"\x1f\x8b"


def numbered_lines(path: str | Path) -> Iterator[Line]:
    """The lines that are not blank, without a byte order mark.

    Raises:
        TraceError: the file is no UTF-8 text, or damaged gzip data.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file, io.TextIOWrapper(_unpacked(path, file), encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: expected whole gzip data, got {error}; copy the file again") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{_not_text(path)}; convert it, as with iconv") from error


def _unpacked(path: str | Path, file: io.BufferedReader) -> BinaryIO:
    """The file's contents. It is opened once, and may be a pipe."""
    start = file.peek(len(_GZIP))[: len(_GZIP)]
    if start == _GZIP:
        return cast(BinaryIO, gzip.open(file))
    if Path(path).suffix == ".gz":
        raise TraceError(f"{path}: expected gzip data, got {start!r}; give plain text a name without .gz")
    return file


def _not_text(path: str | Path) -> str:
    """Which line of the file is no UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(_unpacked(path, file), start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}:{number}: expected UTF-8 text, got {line[error.start : error.start + 4]!r}"
    return f"{path}: expected UTF-8 text, got other bytes"


def json_objects(path: str | Path, lines: Iterable[Line]) -> Iterator[Item]:
    """The objects of JSON lines, or of one document: a list of them, or one written over several lines.

    Raises:
        TraceError: something else, with its line or its place in the list.
    """
    lines = iter(lines)
    first = next(lines)
    values: Iterable[tuple[str, Any]] = _loaded(path, chain([first], lines))
    if first[1].lstrip().startswith("[") or first[1].strip() == "{":
        ((_, document),) = _loaded(path, [(first[0], "".join(line for _, line in chain([first], lines)))])
        items = document if isinstance(document, list) else [document]
        values = ((f"{path}: item {number}", item) for number, item in enumerate(items))
    for place, value in values:
        if not isinstance(value, dict):
            raise TraceError(f"{place}: expected a JSON object, got {type(value).__name__}")
        yield place, value


def _loaded(path: str | Path, lines: Iterable[Line]) -> Iterator[tuple[str, Any]]:
    decode = json.JSONDecoder().raw_decode  # `json.loads` takes a fifth longer for lines of a trace
    for number, line in lines:
        text = line.strip()
        try:
            value, end = decode(text)
            if end < len(text):
                raise ValueError(f"more at column {end + 1}")
        except (ValueError, RecursionError) as error:
            got = f"{text[:40]!r} ({error})"
            raise TraceError(f"{path}:{number}: expected a JSON object, got {got}") from error
        yield f"{path}:{number}", value


__all__ = ["Item", "Line", "json_objects", "numbered_lines"]
