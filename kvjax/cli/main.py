"""Entry of the `kvjax` command: which subcommand, and how its errors are shown.

Flow:    sys.argv -> [main] -> kvjax.cli.commands.<command>.run(args) -> exit status

A command module has `add_arguments(parser)` and `run(args) -> int | None`. Exit status: 0 done, 1 the command says that
something failed, 2 bad arguments or input (one line on stderr; a traceback with --debug), 130 interrupted: long work
reports what is done by then (`kvjax.cli.running.interrupts`). A warning is a line on stderr too.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout

from kvjax import __version__
from kvjax.cli.parser import OneLineParser
from kvjax.cli.running.interrupts import INTERRUPTED
from kvjax.cli.running.output_files import STANDARD_OUTPUT, check_files
from kvjax.cli.running.standard_output import StandardOutput, drop_output
from kvjax.cli.running.told_errors import error_line
from kvjax.errors import KVCacheError
from kvjax.extras import require_extra

COMMANDS = {
    "plan": "Say how many blocks and requests fit in a memory budget, and why.",
    "replay": "Feed a request trace through the cache managers of one or several replicas, without a model.",
    "generate": "Continue prompts with a model: continuous batching over paged, prefix-cached KV.",
    "bench": "Measure how fast a model runs here, by part, beside Hugging Face where it is installed.",
    "check": "Run every op on this machine's devices against what it must give.",
    "launch": "Run a program in several processes of one computation, all again when one of them fails.",
    "completion": "Print what a shell evaluates so that its Tab key knows these commands and their options.",
}

NOTHING_ALONE = ("replay", "launch", "plan", "completion")  # commands that need to be told something


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own); returns the exit status."""
    argv = _asked(sys.argv[1:] if argv is None else list(argv))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows the rest
    try:
        parser, commands = _parsers(argv)
        _complete(parser)
        args = parser.parse_args(argv)
        command = commands[args.command]
        outputs = command.outputs_of(args)
        told = sys.stderr if STANDARD_OUTPUT in outputs.values() else sys.stdout
        with redirect_stdout(StandardOutput(told, goes_on=bool(outputs))):
            status = _run(args, command)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        drop_output(sys.stdout)
        return 0
    if status == INTERRUPTED:
        print("kvjax: interrupted", file=sys.stderr)
    return status


def _complete(parser: OneLineParser) -> None:
    """Answers a shell that asks how a command line may go on, and ends the process; else nothing."""
    if "_ARGCOMPLETE" in os.environ:
        require_extra("argcomplete", "cli", "completing command lines").autocomplete(parser)


def _asked(argv: list[str]) -> list[str]:
    """The command line with the help that is asked for by name, or by a command that does nothing alone."""
    if argv[:1] == ["help"]:
        return [*argv[1:2], "--help"]
    return [*argv, "--help"] if not argv or (len(argv) == 1 and argv[0] in NOTHING_ALONE) else argv


def _run(args: argparse.Namespace, command: OneLineParser) -> int:
    """The command's exit status, its errors and warnings shown."""
    try:
        check_files(command.outputs_of(args), command.inputs_of(args))
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"kvjax: warning: {message}", file=sys.stderr)  # type: ignore[assignment]
            status = importlib.import_module(f"kvjax.cli.commands.{args.command}").run(args) or 0
        sys.stdout.flush()  # here, where a closed pipe or a full disk is expected
        return status
    except BrokenPipeError:
        raise
    except (KVCacheError, ValueError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: jax, devices
        if args.debug:
            raise
        print(f"kvjax {args.command}: error: {error_line(error)}", file=sys.stderr)
        return 2


def _parsers(argv: Sequence[str]) -> tuple[OneLineParser, dict[str, OneLineParser]]:
    """The whole parser, and those of commands; only those that `argv` names get arguments, for a quick start."""
    parser = OneLineParser(
        prog="kvjax", description="Paged, prefix-cached KV memory: generate with it, replay traces, plan it."
    )
    parser.add_argument("--version", action="version", version=f"kvjax {__version__}", help="Show the version.")
    parser.add_argument("--debug", action="store_true", help="Show a traceback where an error occurs.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, OneLineParser] = {}
    named = {*argv, *os.environ.get("COMP_LINE", "").split()}  # the line that a shell asks about
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=summary)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name in named:
            command.add_command(importlib.import_module(f"kvjax.cli.commands.{name}"))
        commands[name] = command
    return parser, commands
