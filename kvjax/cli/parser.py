"""A parser of command lines whose errors are one line, which names the option and where help is.

Flow:    argparse -> [OneLineParser] -> stderr, exit status 2
"""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """argparse's parser, without its usage text in front of an error. Its subcommands have such parsers too."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2; argparse calls it for every error of a command line."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
