"""Which model an engine runs, and how large its pools are: options of `kvjax generate` and `kvjax bench`.

Flow:    [add_model_arguments] -> argparse.Namespace -> kvjax.models.load_model
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.cli.help_text import default_text
from kvjax.models.configs.keys import WEIGHT_DTYPES

BLOCKS_HELP = "Give every pool N blocks, the null block among them, which holds no tokens."


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    """`--model`, `--dtype`, `--keep-quantised`."""
    group.add_argument(
        "--model", type=Path, metavar="DIR", help=f"Load this Hugging Face folder.{default_text('the demo model')}"
    )
    own = default_text("the checkpoint's own")
    group.add_argument("--dtype", choices=WEIGHT_DTYPES, help=f"Compute weights and cache in this dtype.{own}")
    group.add_argument(
        "--keep-quantised",
        action="store_true",
        help="Leave float8 and int8 projections as they are stored, in half the memory, instead of dequantising them.",
    )


__all__ = ["BLOCKS_HELP", "add_model_arguments"]
