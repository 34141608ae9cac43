"""Files that a command writes when its work is done, refused before the work begins.

Flow:    command line -> [output_file, plot_file, check_files] -> path -> [write_json, writing] -> JSON, plots

`-` stands for standard input and output. What a command prints otherwise goes to standard error then.
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
STANDARD_OUTPUT = Path("-")  # a file of that name is ./-
STANDARD_INPUT = "/dev/stdin"
STDOUT = 1  # descriptor
STANDARD = "- writes to standard output."  # of help texts, as the next
PLOTS = "The end of its name says whether it is png, pdf or svg."


def input_file(text: str) -> str:
    """An argument's path to a file to read; that of standard input for `-`."""
    return STANDARD_INPUT if text == str(STANDARD_OUTPUT) else text


def output_file(text: str) -> Path:
    """An argument's path to a file that can be written, or standard output; nothing is created yet."""
    return STANDARD_OUTPUT if text == str(STANDARD_OUTPUT) else named_file(text)


def named_file(text: str) -> Path:
    """Likewise, but not standard output."""
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError("expected a file's name, got ''")
    if path == STANDARD_OUTPUT:
        raise argparse.ArgumentTypeError(f"expected a file's name, got {text!r}; name a file of that name ./-")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that may be written, got {text!r}")
    return path


def plot_file(text: str) -> Path:
    """Likewise, of a picture in one of `PLOT_FORMATS`, which the end of its name says."""
    path = named_file(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(PLOT_FORMATS)}, got {text!r}")
    return path


def check_files(outputs: Mapping[str, Path], inputs: Iterator[str]) -> None:
    """Checks what a command reads and writes, the files to write by option.

    Raises:
        ConfigError: a file to write is read, or written twice, or standard input is read twice.
    """
    given_inputs = list(inputs)
    if given_inputs.count(STANDARD_INPUT) > 1:
        raise ConfigError("expected - for one file to read, got it for two; standard input is read once")
    written = {option: path for option, path in outputs.items() if path != STANDARD_OUTPUT}
    if len(outputs) - len(written) > 1:
        both = " and ".join(option for option in outputs if option not in written)
        raise ConfigError(f"expected - for one of {both}, got it for each; standard output holds one file")
    regular = {option: path for option, path in written.items() if path.is_file() or not path.exists()}
    existing = [given for given in given_inputs if os.path.isfile(given)]
    by_path: dict[str, str] = {}
    for option, path in regular.items():
        read = next((given for given in existing if path.exists() and os.path.samefile(path, given)), None)
        if read is not None:
            raise ConfigError(f"expected {option} with a file that is not read, got {path}, which is the input {read}")
        other = by_path.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"expected a file of its own for {other} and {option}, got {path} for both")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Names the file in an OSError that does not: a full disk, say."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        name = name_of(path) if isinstance(path, Path) else str(path)
        raise type(error)(error.errno, error.strerror, name) from error


def write_json(path: Path, values: Mapping[str, Any], indent: int = 2) -> None:
    """Writes values as JSON.

    Raises:
        OSError: the file, which is named, cannot be written.
    """
    with writing(path), open(target_of(path), "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=indent) + "\n")


def target_of(path: Path) -> Path | int:
    """What `open` writes to: the path, or a descriptor of standard output, which `open` closes with its file."""
    return os.dup(STDOUT) if path == STANDARD_OUTPUT else path


def name_of(path: Path) -> str:
    """What a person is told that was written to."""
    return "standard output" if path == STANDARD_OUTPUT else str(path)


def has_matplotlib() -> bool:
    """Whether plots can be drawn; matplotlib is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(option: str) -> None:
    """Raises MissingExtraError where `option` asks for a plot and matplotlib is not installed."""
    if not has_matplotlib():
        raise MissingExtraError(f"{option} needs matplotlib, which is not installed: pip install 'kvjax[plots]'")
