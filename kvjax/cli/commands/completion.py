"""`kvjax completion`: what a shell evaluates so that its Tab key knows kvjax's commands, options and choices.

Flow:    shell -> [run] -> argcomplete.shellcode -> stdout
"""

from __future__ import annotations

import argparse

from kvjax.extras import require_extra

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax completion`."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.epilog = 'In ~/.bashrc: eval "$(kvjax completion bash)"; in fish: kvjax completion fish | source'


def run(args: argparse.Namespace) -> None:
    """Prints the shell's code.

    Raises:
        MissingExtraError: argcomplete is not installed.
    """
    print(require_extra("argcomplete", "cli", "completing command lines").shellcode(["kvjax"], shell=args.shell))
