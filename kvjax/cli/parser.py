"""A parser of command lines whose errors are one line, which names the option, what may be meant, and where help is.

Flow:    argparse -> [OneLineParser] -> stderr, exit status 2
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from kvjax.cli.help_text import HelpText, examples_text, usage_of
from kvjax.cli.running.output_files import named_file, output_file, plot_file
from kvjax.text import did_you_mean

_WRITTEN = (output_file, named_file, plot_file)
_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)$")


def _expected(choice: re.Match[str]) -> str:
    """An error of a choice in our words."""
    known = re.findall(r"[\w.-]+", choice["choices"])
    return f"expected one of {', '.join(known)}, got {choice['given']!r}{did_you_mean(choice['given'], known)}"


class OneLineParser(argparse.ArgumentParser):
    """argparse's parser, without its usage text in front of an error. Its subcommands have such parsers too.

    Options are written out, and an argument that a command does not have is an error of that command.
    """

    def __init__(self, **kwargs: Any) -> None:
        own: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpText}
        super().__init__(**own | kwargs)
        self._has_commands = False
        for action in self._actions:  # argparse's own -h
            action.help = "Show this help."

    def add_subparsers(self, **kwargs: Any) -> Any:  # argparse's own type is private
        """As argparse's."""
        self._has_commands = True
        return super().add_subparsers(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, without arguments that nobody knows."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._has_commands:
            options = [argument for argument in unknown if argument.startswith("-")]
            meant = did_you_mean(options[0].partition("=")[0], self._option_string_actions) if options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2; argparse calls it for every error of a command line."""
        message = _CHOICE.sub(_expected, " ".join(message.split()))
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_command(self, module: Any) -> None:
        """Takes the arguments, usage and examples of a module of `kvjax.cli.commands`."""
        module.add_arguments(self)
        self.usage = usage_of(self.prog, self._actions)
        self.epilog = examples_text(module.EXAMPLES)

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
