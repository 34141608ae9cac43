"""Runs a newcomer's first ten commands in an empty folder, and writes docs/guide/first-hour.md with what each prints.

Flow:    COMMANDS -> [record_first_hour] -> processes -> their output, shortened -> docs/guide/first-hour.md

    python scripts/record_first_hour.py

Each is run as somebody types it, with stdout and stderr in one stream that is no terminal, from an empty compilation
cache on. Of an output of more than HEAD + TAIL lines the first and last of these are kept, and a line between says how
many are left out; a line longer than MAX_WIDTH has "..." in its middle.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "first-hour.md"
HEAD, TAIL = 34, 8  # lines of an output
MAX_WIDTH = 116  # characters of a line
LINE_HEAD, LINE_TAIL = 56, 55  # of a longer one
QUICK_SECONDS = 5.0  # what takes longer has its time told


@dataclass(frozen=True)
class Command:
    """A command line, what it is for, and how it must end."""

    title: str
    why: str
    line: str
    status: int = 0


COMMANDS = (
    Command("What is there", "A bare command prints its help.", "kvjax"),
    Command(
        "What fits into 16 GiB",
        "A plan needs a model's config and no weights.",
        "kvjax plan llama-3-8b --memory 16GiB --max-model-len 8192",
    ),
    Command(
        "A typo",
        "Errors are one line that says what is meant; the exit status is 2.",
        "kvjax plan lama-3-8b --memory 16GiB",
        status=2,
    ),
    Command(
        "A text",
        "The demo model writes. The first run compiles; the same command again takes that from the compilation cache.",
        'kvjax generate "The with statement" --max-tokens 24',
    ),
    Command(
        "What is found in the cache",
        "The demo's requests begin with the same instructions, and some go on with the same questions.",
        "kvjax generate --quiet --miss-reasons --plot pool.png",
    ),
    Command(
        "A workload without a model",
        "Two minutes of chats through the real cache managers.",
        "kvjax replay --generate chat --num-requests 200 --num-blocks 1200 --plot chat.png",
    ),
    Command(
        "How far from the best",
        "The same bytes under other rules, and for somebody who knows the future.",
        "kvjax replay --generate chat --num-requests 200 --num-blocks 1200 --serial --bound",
    ),
    Command(
        "How much memory, for which model",
        "A table, and a picture with a line per model.",
        "kvjax replay --generate chat --num-requests 100 --compare-defaults llama-3-8b,gpt-oss-120b "
        "--memory-sizes 1GB,2GB,4GB --plot-only --plot memory.png",
    ),
    Command(
        "A trace",
        "The workload in the form that a file of your own may have.",
        "kvjax replay --generate chat --num-requests 100 --write chats.jsonl",
    ),
    Command(
        "Two replicas",
        "What a router wins that follows the replicas' caches.",
        "kvjax replay chats.jsonl --num-blocks 1200 --replicas 2 --router round_robin --router prefix",
    ),
)


def shortened(text: str) -> list[str]:
    """The lines of an output that the page has."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    if len(lines) > HEAD + TAIL + 1:
        lines[HEAD:-TAIL] = [f"... {len(lines) - HEAD - TAIL} more lines ..."]
    return [line if len(line) <= MAX_WIDTH else _cut(line) for line in lines]


def _cut(line: str) -> str:
    return f"{line[:LINE_HEAD].rstrip()} ... {line[-LINE_TAIL:].lstrip()}"


def run(command: Command, folder: Path) -> tuple[str, float]:
    """What it prints, and how many seconds it takes.

    Raises:
        RuntimeError: it ends with another exit status.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": str(MAX_WIDTH),
    }
    start = time.perf_counter()
    done = subprocess.run(
        shlex.split(command.line),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != command.status:
        raise RuntimeError(
            f"expected status {command.status} of {command.line!r}, got {done.returncode}: {done.stdout}"
        )
    return done.stdout, time.perf_counter() - start


def page(outputs: Iterator[tuple[Command, str, float]]) -> Iterator[str]:
    """Lines of the page."""
    yield "# The first hour"
    yield ""
    yield "Ten commands of a newcomer, and what each prints. `scripts/demo.sh` or `pip install` came before"
    yield "([start](../index.md)); what pictures show stands in [Pictures](../pictures.md)."
    yield "`python scripts/record_first_hour.py` runs the commands and writes this page."
    yield f"Of an output of more than {HEAD + TAIL + 1} lines it keeps the first {HEAD} and the last {TAIL};"
    yield f"a line longer than {MAX_WIDTH} characters has `...` in its middle."
    yield "Times are those of two hardware threads of a CPU that others used too."
    yield ""
    yield "```"
    yield from (command.line for command in COMMANDS)
    yield "```"
    for number, (command, output, seconds) in enumerate(outputs, start=1):
        took = f" It took {seconds:.0f} s." if seconds > QUICK_SECONDS else ""
        yield from ("", f"## {number}. {command.title}", "", f"{command.why}{took}", "")
        yield from ("```", f"$ {command.line}", *shortened(output), "```")


def main(arguments: list[str] | None = None) -> int:
    """Writes the page; returns the exit status."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    with TemporaryDirectory() as name:
        lines = list(page((command, *run(command, Path(name))) for command in COMMANDS))
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
