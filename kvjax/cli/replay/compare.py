"""`kvjax replay --compare-defaults`: what defaults hit over models and memory sizes, and what it is measured against.

Flow:    arguments -> [run_compare] -> kvjax.replay.compare, a command that replays elsewhere -> Cells -> table, plot

The JSON file is written after every run. What a file of the same settings has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvjax
from kvjax.cli.help_text import default_text
from kvjax.cli.options.replay import config_of, specs_of, trace_of
from kvjax.cli.options.types import byte_size, int_list
from kvjax.cli.pictures.figures import save_figure
from kvjax.cli.replay.cells import Cell, Cells
from kvjax.cli.replay.plot import workload_name
from kvjax.cli.replay.replicas import first_given
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import require_matplotlib
from kvjax.cli.running.progress import progress
from kvjax.errors import ConfigError, MemoryBudgetError
from kvjax.replay import ReplayConfig, TraceRequest, write_trace
from kvjax.replay.compare import (
    BATCHES,
    BOUNDS,
    FREE_EXCHANGE,
    INFINITE,
    RUNS,
    SERIAL,
    bound_hits,
    infinite_hits,
    replay_hits,
)
from kvjax.text import align_table, count_of

SHARES = ((SERIAL, FREE_EXCHANGE), (BATCHES, SERIAL))
STDERR = 2  # descriptor
DEFAULT_SIZES = "100GB,200GB,400GB"
TAKEN = ("memory_bytes", "num_blocks", "record", "miss_reasons", "bound", "host_bytes")
NEEDS_COMPARISON = ("memory_sizes", "user_counts", "plot_only", "beside")
NO_SETTINGS = (
    "compare_defaults",
    *NEEDS_COMPARISON,
    "serial",
    "json",
    "plot",
    "no_progress",
    "debug",
    "command",
    "model",
)


def add_compare_arguments(group: argparse._ArgumentGroup) -> None:
    """Models, sizes, and what else to run."""
    group.add_argument(
        "--compare-defaults",
        metavar="MODEL,MODEL",
        help="Print a table instead of what each model hits by default, but for other options that are given: one "
        "prompt at a time and, without --serial, in batches.",
    )
    group.add_argument(
        "--memory-sizes",
        type=_sizes,
        metavar="BYTES,BYTES",
        help=f"Give one device each of these sizes of memory.{default_text(DEFAULT_SIZES)}",
    )
    group.add_argument(
        "--user-counts",
        type=int_list,
        metavar="N,N",
        help=f"Run each of these numbers of users at once, of a trace of sessions.{default_text('as --users says')}",
    )
    group.add_argument(
        "--plot-only",
        action="store_true",
        help="Fill only the columns that --plot draws: hits in batches, or one at a time with --serial, and those of "
        "an infinite cache.",
    )
    group.add_argument(
        "--beside",
        metavar="COMMAND",
        help="Add what another manager hits, as scripts/vllm_replay.py does. COMMAND is called with a trace, --models, "
        "--memory and --json.",
    )


def wants_comparison(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for a table.

    Raises:
        ConfigError: arguments that contradict one another.
    """
    wants = args.compare_defaults is not None
    if args.users is not None and args.user_counts is not None:
        raise ConfigError("expected --users N or --user-counts N,N, got both")
    if wants and (given := first_given(args, TAKEN)):
        raise ConfigError(f"expected {given} without --compare-defaults, got both; leave one out")
    if not wants and (given := first_given(args, NEEDS_COMPARISON)):
        raise ConfigError(f"expected --compare-defaults with {given}, got it alone")
    return wants


def run_compare(args: argparse.Namespace) -> int:
    """Fills the table, prints and draws it, or what there is of it when an interrupt comes; 0, or that it came.

    Raises:
        ConfigError: a bad model, a command beside that fails, or no trace.
        TraceError: a trace of an unknown form, of no sessions where users vary, or a bad line of it.
        MissingExtraError: --plot without matplotlib.
    """
    if args.plot is not None:
        require_matplotlib("--plot")
    models = args.compare_defaults.split(",")
    configs = {model: replace(config_of(args), specs=specs_of(args, model)) for model in dict.fromkeys(models)}
    sizes, numbers = args.memory_sizes or _sizes(DEFAULT_SIZES), args.user_counts or [None]
    keys = [(model, size, users) for model in configs for size in sizes for users in numbers]
    table = Cells(keys, _settings(args), args.json)
    with interruptible() as should_stop:
        is_complete = all(_fill_users(table, users, args, configs, should_stop) for users in numbers)
    if not is_complete:
        num_done = sum(cell.error is not None or INFINITE in cell.hit_tokens for cell in table.cells)
        print(f"interrupted after {num_done} of {count_of(len(table.cells), 'cell')}; until then:")
    table.write(is_last=True)
    print(_table_text(table.cells))
    if args.plot is not None:
        from kvjax.cli.replay.compare_plot import draw_comparison

        save_figure(draw_comparison(table.cells, workload_name(args)), args.plot)
    return 0 if is_complete else INTERRUPTED


def _sizes(text: str) -> list[int]:
    return [byte_size(part) for part in text.split(",")]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on but for model and size, as JSON has it."""
    given = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    return json.loads(json.dumps({"version": kvjax.__version__} | given, default=str))


def _fill_users(
    table: Cells,
    users: int | None,
    args: argparse.Namespace,
    configs: Mapping[str, ReplayConfig],
    should_stop: Callable[[], bool],
) -> bool:
    """Fills the cells of so many users at once, None: of a trace as `args` reads it; False: it was to stop."""
    trace, _ = trace_of(args if users is None else argparse.Namespace(**vars(args) | {"users": users}))
    cells, columns = table.of_users(users), _columns(args)
    total = len(cells) * sum(column in RUNS for column in columns) * len(trace)
    with progress("Comparing", total, "request", enabled=not args.no_progress) as advance:
        for cell in cells:
            cell.prompt_tokens = sum(request.input_length for request in trace)
            if not _fill(table, cell, trace, configs[cell.model], columns, advance, should_stop):
                return False
    if args.beside is not None:
        _run_beside(table, cells, trace, args.beside)
    return True


def _columns(args: argparse.Namespace) -> list[str]:
    """What a cell is to have; the first of BOUNDS stands for all of them."""
    if args.plot_only:
        return [SERIAL if args.serial else BATCHES, INFINITE]
    return [*(run for run in RUNS if run != BATCHES or not args.serial), FREE_EXCHANGE, INFINITE]


def _fill(
    table: Cells,
    cell: Cell,
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    columns: Sequence[str],
    on_progress: Callable[[int], object],
    should_stop: Callable[[], bool],
) -> bool:
    """Finds what a cell lacks; False: it was to stop."""
    config = replace(config, memory_bytes=cell.memory_bytes)
    for column in columns:
        if column in cell.hit_tokens or cell.error is not None:
            on_progress(len(trace) * (column in RUNS))
            continue
        try:
            hit_tokens = _hits(column, trace, config, on_progress, should_stop)
        except MemoryBudgetError as error:
            cell.error = str(error)
            table.write()
            continue
        if hit_tokens is None:
            return False
        table.note(cell, hit_tokens)
    return not should_stop()


def _hits(
    column: str,
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    on_progress: Callable[[int], object],
    should_stop: Callable[[], bool],
) -> dict[str, int] | None:
    """Hit tokens of a column, and of what is found with it; None: it was to stop."""
    if column in RUNS:
        return replay_hits(column, trace, config, on_progress, should_stop)
    return (infinite_hits if column == INFINITE else bound_hits)(trace, config)


def _run_beside(table: Cells, cells: Sequence[Cell], trace: Sequence[TraceRequest], command: str) -> None:
    """Lets the command replay, and adds columns of its names to the cells of the trace."""
    models = dict.fromkeys(cell.model for cell in cells)
    sizes = dict.fromkeys(str(cell.memory_bytes) for cell in cells)
    with TemporaryDirectory() as folder:
        trace_path, found_path = Path(folder, "trace.jsonl"), Path(folder, "found.json")
        write_trace(trace, trace_path)
        options = ["--models", ",".join(models), "--memory", ",".join(sizes), "--json", str(found_path)]
        done = subprocess.run([*shlex.split(command), str(trace_path), *options], stdout=STDERR, check=False)
        if done.returncode:
            raise ConfigError(f"expected --beside {command!r} to replay, got exit status {done.returncode}")
        rows = json.loads(found_path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        for cell in cells:
            if (cell.model, cell.memory_bytes) == (row["model"], row["memory_bytes"]):
                table.note(cell, {row["name"]: row["hit_tokens"]})


def _table_text(cells: Sequence[Cell]) -> str:
    """Percent of all prompt tokens, by cell and column; then what share of another column it is."""
    found = dict.fromkeys(column for cell in cells for column in cell.hit_tokens)
    own = [column for column in (*RUNS, *BOUNDS, INFINITE) if column in found]
    columns = own + [column for column in found if column not in own]
    shares = [" / ".join(pair) for pair in SHARES]
    rows = [[cell.model, f"{cell.memory_bytes / 1e9:,.6g} GB", *_percents(cell, columns)] for cell in cells]
    header = ["model", "memory", *columns, *shares]
    if any(cell.users is not None for cell in cells):
        header.insert(2, "users")
        for row, cell in zip(rows, cells, strict=True):
            row.insert(2, f"{cell.users:,}")
    totals = sorted({cell.prompt_tokens for cell in cells if cell.prompt_tokens})
    parts = [
        f"percent of {' to '.join(f'{total:,}' for total in dict.fromkeys(totals[:1] + totals[-1:]))} prompt tokens "
        "that were hit",
        align_table(header, rows, left={0}),
        *(f"{cell.model}, {cell.memory_bytes:,} bytes: {cell.error}" for cell in cells if cell.error is not None),
    ]
    return "\n".join(parts)


def _percents(cell: Cell, columns: Sequence[str]) -> Iterator[str]:
    hits = cell.hit_tokens
    for column in columns:
        percent = cell.percent(column)
        yield "-" if percent is None else f"{percent:.2f}"
    for part, whole in SHARES:
        yield f"{hits[part] / hits[whole]:.1%}" if part in hits and hits.get(whole) else "-"


__all__ = ["add_compare_arguments", "run_compare", "wants_comparison"]
