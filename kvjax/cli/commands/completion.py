"""`kvjax completion`: what a shell evaluates so that its Tab key knows kvjax's commands, options and choices.

Flow:    shell -> [run] -> argcomplete.shellcode -> stdout
"""

from __future__ import annotations

import argparse

from kvjax.cli.help_text import Example
from kvjax.extras import require_extra

EXAMPLES = (
    Example("Complete command lines in bash, when it is in ~/.bashrc.", 'eval "$(kvjax completion bash)"'),
    Example("Complete them in fish.", "kvjax completion fish | source"),
)
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax completion`."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"Print it for {', '.join(SHELLS)}.")


def run(args: argparse.Namespace) -> None:
    """Prints the shell's code.

    Raises:
        MissingExtraError: argcomplete is not installed.
    """
    print(require_extra("argcomplete", "cli", "completing command lines").shellcode(["kvjax"], shell=args.shell))
