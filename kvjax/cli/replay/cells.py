"""The cells of a table over models, memory sizes and users at once, in a file that grows with every run.

Flow:    (model, bytes, users), settings -> [Cells] -> JSON file -> the table and the plot of `--compare-defaults`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvjax.cli.running.output_files import STANDARD_OUTPUT, write_json


@dataclass
class Cell:
    """A model, a memory size, and how many users at once if that is varied.

    `hit_tokens` by column, of `prompt_tokens`; `error`: why there are none of its own.
    """

    model: str
    memory_bytes: int
    users: int | None = None
    prompt_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int | None]:
        """What tells it from other cells."""
        return self.model, self.memory_bytes, self.users

    def percent(self, column: str) -> float | None:
        """How much of the prompts was hit; None: not found out."""
        hits = self.hit_tokens.get(column)
        return None if hits is None or not self.prompt_tokens else 100 * hits / self.prompt_tokens


class Cells:
    """All cells of a table, in a file if there is one; those of a file of the same settings are taken from it.

    Standard output gets the last state alone.
    """

    def __init__(
        self, keys: Iterable[tuple[str, int, int | None]], settings: dict[str, Any], path: Path | None
    ) -> None:
        self._path, self._settings = path, settings
        known = (
            {} if path is None or path == STANDARD_OUTPUT else {cell.key: cell for cell in _known_cells(path, settings)}
        )
        self.cells = [known.get(key) or Cell(*key) for key in keys]

    def of_users(self, users: int | None) -> list[Cell]:
        """Those of so many users at once."""
        return [cell for cell in self.cells if cell.users == users]

    def note(self, cell: Cell, hit_tokens: dict[str, int]) -> None:
        """Adds columns to a cell, and writes the file."""
        cell.hit_tokens |= hit_tokens
        self.write()

    def write(self, *, is_last: bool = False) -> None:
        """Writes the file."""
        if self._path is not None and (is_last or self._path != STANDARD_OUTPUT):
            data = {"settings": self._settings, "cells": [vars(cell) for cell in self.cells]}
            write_json(self._path, data)


def _known_cells(path: Path, settings: dict[str, Any]) -> Iterator[Cell]:
    """Those of a file of the same settings; none of any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(data, dict) and data.get("settings") == settings:
        yield from (Cell(**cell) for cell in data["cells"])


__all__ = ["Cell", "Cells"]
