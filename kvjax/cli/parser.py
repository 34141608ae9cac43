"""A parser of command lines whose errors are one line, which names the option, what may be meant, and where help is.

Flow:    argparse -> [OneLineParser] -> stderr, exit status 2
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvjax.cli.running.output_files import output_file, plot_file

_WRITTEN = (output_file, plot_file)
_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)$")


class OneLineParser(argparse.ArgumentParser):
    """argparse's parser, without its usage text in front of an error. Its subcommands have such parsers too.

    Options are written out, and an argument that a command does not have is an error of that command.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)
        self._has_commands = False

    def add_subparsers(self, **kwargs: Any) -> Any:  # argparse's own type is private
        """As argparse's."""
        self._has_commands = True
        return super().add_subparsers(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, without arguments that nobody knows."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._has_commands:
            options = [argument for argument in unknown if argument.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(options[:1], self._option_string_actions)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2; argparse calls it for every error of a command line."""
        choice = _CHOICE.search(message)
        meant = "" if choice is None else _meant([choice["given"]], re.findall(r"[\w.-]+", choice["choices"]))
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}{meant} (see {self.prog} --help)\n")

    def outputs_of(self, args: argparse.Namespace) -> dict[str, Path]:
        """Files that the command is to write, by option."""
        return {
            action.option_strings[0]: getattr(args, action.dest)
            for action in self._actions
            if action.type in _WRITTEN and getattr(args, action.dest, None) is not None
        }

    def inputs_of(self, args: argparse.Namespace) -> Iterator[str]:
        """All other arguments, any of which may name a file."""
        written = {action.dest for action in self._actions if action.type in _WRITTEN}
        for name, value in vars(args).items():
            for one in value if isinstance(value, list) else [value]:
                if name not in written and isinstance(one, (str, Path)):
                    yield str(one)


def _meant(given: Sequence[str], known: Iterable[str]) -> str:
    """A question that names what of the known is most like the given; empty where nothing is."""
    close = difflib.get_close_matches(given[0].partition("=")[0], list(known), n=1) if given else []
    return f"; did you mean {close[0]}?" if close else ""
