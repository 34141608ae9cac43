"""Releases of libtpu, the compiler for TPU: which there are, and one as a folder that a compilation can load.

Flow:    "newest" | "previous" | "pinned" | "installed" | "0.0.51" -> [release] -> Release -> compiler.environment

`newest` and `previous`: the last two that pip finds. `pinned`: what the `[tpu]` extra of the installed jax asks for.
A release that is not installed beside jax is put by pip into a folder of its own, once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

WORDS = ("installed", "newest", "previous", "pinned")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class LibtpuError(RuntimeError):
    """No such release, or pip failed."""


@dataclass(frozen=True)
class Release:
    """One release of libtpu."""

    version: str
    library: Path | None = None  # of the folder that it lies in; None: the one installed beside jax

    @property
    def environment(self) -> dict[str, str]:
        """What makes jax load it."""
        return {} if self.library is None else {"TPU_LIBRARY_PATH": str(self.library)}


def release(word: str) -> Release:
    """The release that `word` names, installed first if it is not there.

    Raises:
        LibtpuError: pip knows no such release or cannot be asked, or libtpu is not installed.
    """
    installed = installed_version()
    if word == "installed":
        if installed is None:
            raise LibtpuError("expected libtpu beside jax, found none; install kvjax[tpu-aot]")
        return Release(installed)
    version = named(word, available, metadata.requires("jax") or ())
    return Release(version) if version == installed else Release(version, _library(version))


def installed_version() -> str | None:
    """The version of the libtpu beside jax; None: there is none."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return None


def named(word: str, known: Callable[[], Sequence[str]], jax_requires: Sequence[str]) -> str:
    """The version that `word` names among the `known` ones, newest first; a version stands for itself."""
    if word not in WORDS:
        if not re.fullmatch(r"\d+(\.\d+)+", word):
            raise LibtpuError(f"expected a version of libtpu or one of {', '.join(WORDS)}, got {word!r}")
        return word
    pattern = pinned_pattern(jax_requires) if word == "pinned" else "*"
    versions = [version for version in known() if fnmatchcase(version, pattern) or fnmatchcase(version + ".", pattern)]
    place = int(word == "previous")
    if len(versions) <= place:
        raise LibtpuError(f"expected a release of libtpu that is {word} ({pattern}), pip finds none")
    return versions[place]


def pinned_pattern(jax_requires: Sequence[str]) -> str:
    """The version of libtpu that jax's `[tpu]` extra asks for, such as "0.0.50.*"."""
    for requirement in jax_requires:
        match = re.match(r"libtpu\s*==\s*([\w.*]+)\s*;.*extra\s*==\s*['\"]tpu['\"]", requirement)
        if match is not None:
            return match[1]
    raise LibtpuError(f"expected jax to pin libtpu in its extra 'tpu', it requires {list(jax_requires)}")


def available() -> list[str]:
    """The versions that pip finds, newest first."""
    said = _pip("index", "versions", "libtpu")
    match = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    if match is None:
        raise LibtpuError(f"expected versions of libtpu from pip, got {said!r}")
    return match[1].replace(" ", "").split(",")


def folder() -> Path:
    """Where releases are kept: `KVJAX_LIBTPU`, by default in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("KVJAX_LIBTPU") or cache / "kvjax" / "libtpu")


def _library(version: str) -> Path:
    """libtpu.so of a release in the folder; its own folder is there whole or not at all."""
    target = folder() / version
    if not target.exists():
        part = folder() / f"{version}.{os.getpid()}"
        _pip("install", "--quiet", "--no-deps", "--target", str(part), f"libtpu=={version}")
        part.replace(target)
    return target / "libtpu" / "libtpu.so"


def _pip(*arguments: str) -> str:
    done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LibtpuError(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()[-800:]}")
    return done.stdout
