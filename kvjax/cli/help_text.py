"""How a command's help looks: a short usage, sentences that end with their default and choices, examples as typed.

Flow:    Example, argparse's actions -> [HelpText, usage_of, examples_text] -> --help
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT = "[default: "  # how every help text shows one


@dataclass(frozen=True)
class Example:
    """A command line that can be run, and what it does."""

    what: str
    line: str


def default_text(value: object) -> str:
    """How a default ends a help text; thousands are grouped."""
    if isinstance(value, float):
        return f" {DEFAULT}{value:,g}]"
    return f" {DEFAULT}{value:,}]" if isinstance(value, int) else f" {DEFAULT}{value}]"


def examples_text(examples: Sequence[Example]) -> str:
    """The examples as the end of a help, two lines each."""
    return "examples:\n" + "\n".join(f"  {one.what}\n    $ {one.line}" for one in examples)


def usage_of(prog: str, actions: Iterable[argparse.Action]) -> str:
    """A usage that names what is given by place; options are listed below it."""
    shapes = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    places = (
        shapes.get(str(action.nargs), "{}").format(action.metavar) for action in actions if not action.option_strings
    )
    return " ".join([prog, "[OPTIONS]", *places])


class HelpText(argparse.HelpFormatter):
    """argparse's formatter: an epilog keeps its lines, and choices stand behind an option's text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if text is None or action.option_strings == [] or action.dest == "help":
            return text
        if DEFAULT not in text and _has_default(action.default):
            text += default_text(action.default)
        return text if action.choices is None else f"{text} [choices: {', '.join(map(str, action.choices))}]"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and action.choices is not None:
            name = action.option_strings[-1].lstrip("-").replace("-", "_").upper()
            return lambda size: (name,) * size
        return super()._metavar_formatter(action, default_metavar)


def _has_default(value: Any) -> bool:
    return value is not argparse.SUPPRESS and not isinstance(value, bool) and value not in (None, [])


__all__ = ["DEFAULT", "Example", "HelpText", "default_text", "examples_text", "usage_of"]
