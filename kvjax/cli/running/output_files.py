"""Files that a command writes when its work is done, refused before the work begins.

Flow:    command line -> [output_file, require_matplotlib] -> path -> JSON, PNG
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from kvjax.errors import MissingExtraError


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


def has_matplotlib() -> bool:
    """Whether plots can be drawn; matplotlib is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(option: str) -> None:
    """Raises MissingExtraError where `option` asks for a plot and matplotlib is not installed."""
    if not has_matplotlib():
        raise MissingExtraError(f"{option} needs matplotlib, which is not installed: pip install 'kvjax[plots]'")
