"""Files that a command writes when its work is done, refused before the work begins.

Flow:    command line -> [output_file, plot_file, check_files] -> path -> [write_json, writing] -> JSON, plots
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvjax.errors import ConfigError, MissingExtraError

PLOT_FORMATS = (".png", ".pdf", ".svg")


def output_file(text: str) -> Path:
    """An argument's path to a file that can be written; nothing is created yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that may be written, got {text!r}")
    return path


def plot_file(text: str) -> Path:
    """Likewise, of a picture in one of `PLOT_FORMATS`, which the end of its name says."""
    path = output_file(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(PLOT_FORMATS)}, got {text!r}")
    return path


def check_files(outputs: Mapping[str, Path], inputs: Iterator[str]) -> None:
    """Raises ConfigError where a file to write, by option, is one that the command reads, or another to write."""
    regular = {option: path for option, path in outputs.items() if path.is_file() or not path.exists()}
    existing = [given for given in inputs if os.path.isfile(given)]
    by_path: dict[str, str] = {}
    for option, path in regular.items():
        read = next((given for given in existing if path.exists() and os.path.samefile(path, given)), None)
        if read is not None:
            raise ConfigError(f"expected {option} with a file that is not read, got {path}, which is the input {read}")
        other = by_path.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"expected a file of its own for {other} and {option}, got {path} for both")


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Names the file in an OSError that does not: a full disk, say."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, values: Mapping[str, Any], indent: int = 2) -> None:
    """Writes values as JSON.

    Raises:
        OSError: the file, which is named, cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")


def has_matplotlib() -> bool:
    """Whether plots can be drawn; matplotlib is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(option: str) -> None:
    """Raises MissingExtraError where `option` asks for a plot and matplotlib is not installed."""
    if not has_matplotlib():
        raise MissingExtraError(f"{option} needs matplotlib, which is not installed: pip install 'kvjax[plots]'")
