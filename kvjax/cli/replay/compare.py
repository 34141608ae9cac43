"""`kvjax replay --compare-defaults`: what defaults hit over models and memory sizes, and what it is measured against.

Flow:    arguments -> [run_compare] -> kvjax.replay.compare, a command that replays elsewhere -> Cells -> table, JSON

The JSON file is written after every run. What a file of the same settings has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvjax
from kvjax.cli.options.replay import config_of, specs_of
from kvjax.cli.options.types import byte_size
from kvjax.cli.replay.replicas import first_given
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import write_json
from kvjax.cli.running.progress import progress
from kvjax.errors import ConfigError, MemoryBudgetError
from kvjax.replay import ReplayConfig, TraceRequest, write_trace
from kvjax.replay.compare import BATCHES, BOUNDS, FREE_EXCHANGE, RUNS, SERIAL, bound_hits, replay_hits
from kvjax.text import align_table, count_of

SHARES = ((SERIAL, FREE_EXCHANGE), (BATCHES, SERIAL))
STDERR = 2  # descriptor
DEFAULT_SIZES = "100GB,200GB,400GB"
TAKEN = ("memory_bytes", "num_blocks", "plot", "record", "miss_reasons", "bound", "host_bytes")
NEEDS_COMPARISON = ("memory_sizes", "beside")
NO_SETTINGS = ("compare_defaults", *NEEDS_COMPARISON, "serial", "json", "no_progress", "debug", "command", "model")


def add_compare_arguments(group: argparse._ArgumentGroup) -> None:
    """Models, sizes, and what else to run."""
    group.add_argument(
        "--compare-defaults",
        metavar="MODEL,MODEL",
        help="instead: a table of what defaults (but for other options that are given) hit for each model, one prompt "
        "at a time and, without --serial, in batches",
    )
    group.add_argument(
        "--memory-sizes", type=_sizes, metavar="BYTES,BYTES", help=f"of one device (default: {DEFAULT_SIZES})"
    )
    group.add_argument(
        "--beside",
        metavar="COMMAND",
        help="and what another manager hits: it is called with a trace, --models, --memory and --json "
        "(scripts/vllm_replay.py)",
    )


def wants_comparison(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for a table.

    Raises:
        ConfigError: arguments that contradict one another.
    """
    wants = args.compare_defaults is not None
    if wants and (given := first_given(args, TAKEN)):
        raise ConfigError(f"expected {given} without --compare-defaults, got both; leave one out")
    if not wants and (given := first_given(args, NEEDS_COMPARISON)):
        raise ConfigError(f"expected --compare-defaults with {given}, got it alone")
    return wants


@dataclass
class Cell:
    """A model and a memory size. `hit_tokens` by column; `error`: why there are none of its own."""

    model: str
    memory_bytes: int
    hit_tokens: dict[str, int] = field(default_factory=dict)
    error: str | None = None


class Cells:
    """All cells of a table, in a file if there is one."""

    def __init__(self, cells: Sequence[tuple[str, int]], settings: dict[str, Any], path: Path | None) -> None:
        self.path, self._settings = path, settings
        known = {} if path is None else _known_cells(path, settings)
        self.cells = [known.get(cell) or Cell(*cell) for cell in cells]

    def note(self, cell: Cell, hit_tokens: dict[str, int]) -> None:
        """Adds columns to a cell, and writes the file."""
        cell.hit_tokens |= hit_tokens
        self.write()

    def write(self) -> None:
        """Writes the file."""
        if self.path is not None:
            data = {"settings": self._settings, "cells": [vars(cell) for cell in self.cells]}
            write_json(self.path, data)


def run_compare(args: argparse.Namespace, trace: Sequence[TraceRequest]) -> int:
    """Fills the table and prints it, or what there is of it when an interrupt comes; 0, or that it came.

    Raises:
        ConfigError: a bad model, or a command beside that fails.
    """
    models = args.compare_defaults.split(",")
    configs = {model: replace(config_of(args), specs=specs_of(args, model)) for model in dict.fromkeys(models)}
    sizes = args.memory_sizes or _sizes(DEFAULT_SIZES)
    table = Cells([(model, size) for model in configs for size in sizes], _settings(args), args.json)
    runs = [run for run in RUNS if run != BATCHES or not args.serial]
    with (
        interruptible() as should_stop,
        progress(
            "Comparing", len(table.cells) * len(runs) * len(trace), "request", enabled=not args.no_progress
        ) as bar,
    ):
        is_complete = all(
            _fill(table, cell, trace, configs[cell.model], runs, bar, should_stop) for cell in table.cells
        )
    if is_complete and args.beside is not None:
        _run_beside(table, trace, args.beside)
    if not is_complete:
        num_done = sum(cell.error is not None or FREE_EXCHANGE in cell.hit_tokens for cell in table.cells)
        print(f"interrupted after {num_done} of {count_of(len(table.cells), 'cell')}; until then:")
    print(_table_text(table.cells, sum(request.input_length for request in trace)))
    return 0 if is_complete else INTERRUPTED


def _sizes(text: str) -> list[int]:
    return [byte_size(part) for part in text.split(",")]


def _known_cells(path: Path, settings: dict[str, Any]) -> dict[tuple[str, int], Cell]:
    """By model and size, those of a file of the same settings; none of any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict) or data.get("settings") != settings:
        return {}
    return {(cell["model"], cell["memory_bytes"]): Cell(**cell) for cell in data["cells"]}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on but for model and size, as JSON has it."""
    given = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    return json.loads(json.dumps({"version": kvjax.__version__} | given, default=str))


def _fill(
    table: Cells,
    cell: Cell,
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    runs: Sequence[str],
    on_progress: Callable[[int], object],
    should_stop: Callable[[], bool],
) -> bool:
    """Runs what a cell lacks; False: it was to stop."""
    config = replace(config, memory_bytes=cell.memory_bytes)
    try:
        for run in runs:
            if run in cell.hit_tokens or cell.error is not None:
                on_progress(len(trace))
                continue
            hit_tokens = replay_hits(run, trace, config, on_progress, should_stop)
            if hit_tokens is None:
                return False
            table.note(cell, hit_tokens)
        if FREE_EXCHANGE not in cell.hit_tokens and cell.error is None:
            table.note(cell, bound_hits(trace, config))
    except MemoryBudgetError as error:
        cell.error = str(error)
        table.write()
    return not should_stop()


def _run_beside(table: Cells, trace: Sequence[TraceRequest], command: str) -> None:
    """Lets the command replay, and adds columns of its names."""
    models = dict.fromkeys(cell.model for cell in table.cells)
    sizes = dict.fromkeys(str(cell.memory_bytes) for cell in table.cells)
    with TemporaryDirectory() as folder:
        trace_path, found_path = Path(folder, "trace.jsonl"), Path(folder, "found.json")
        write_trace(trace, trace_path)
        options = ["--models", ",".join(models), "--memory", ",".join(sizes), "--json", str(found_path)]
        done = subprocess.run([*shlex.split(command), str(trace_path), *options], stdout=STDERR, check=False)
        if done.returncode:
            raise ConfigError(f"expected --beside {command!r} to replay, got exit status {done.returncode}")
        rows = json.loads(found_path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        cells = [c for c in table.cells if (c.model, c.memory_bytes) == (row["model"], row["memory_bytes"])]
        for cell in cells:
            table.note(cell, {row["name"]: row["hit_tokens"]})


def _table_text(cells: Sequence[Cell], prompt_tokens: int) -> str:
    """Percent of all prompt tokens, by cell and column; then what share of another column it is."""
    found = dict.fromkeys(column for cell in cells for column in cell.hit_tokens)
    own = [column for column in (*RUNS, *BOUNDS) if column in found]
    columns = own + [column for column in found if column not in own]
    rows = [
        [cell.model, f"{cell.memory_bytes / 1e9:,.6g} GB", *_percents(cell, columns, prompt_tokens)] for cell in cells
    ]
    parts = [
        f"percent of {prompt_tokens:,} prompt tokens that were hit",
        align_table(["model", "memory", *columns, *(" / ".join(pair) for pair in SHARES)], rows, left={0}),
        *(f"{cell.model}, {cell.memory_bytes:,} bytes: {cell.error}" for cell in cells if cell.error is not None),
    ]
    return "\n".join(parts)


def _percents(cell: Cell, columns: Sequence[str], prompt_tokens: int) -> Iterator[str]:
    hits = cell.hit_tokens
    for column in columns:
        yield f"{100 * hits[column] / prompt_tokens:.2f}" if column in hits else "-"
    for part, whole in SHARES:
        yield f"{hits[part] / hits[whole]:.1%}" if part in hits and hits.get(whole) else "-"


__all__ = ["add_compare_arguments", "run_compare", "wants_comparison"]
