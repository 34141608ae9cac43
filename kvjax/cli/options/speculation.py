"""Arguments of speculative decoding: who drafts, and how many tokens.

Flow:    argparse -> [add_speculation_arguments] -> [read_speculation] -> EngineConfig.speculative
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.cli.help_text import default_text
from kvjax.cli.options.types import positive_int
from kvjax.engine import SpeculativeConfig
from kvjax.engine.scheduling.speculation import Method

METHODS: dict[str, Method] = {"prompt-lookup": "prompt_lookup", "draft-model": "draft_model"}
DEFAULT_NUM_DRAFTS = 4


def add_speculation_arguments(group: argparse._ArgumentGroup) -> None:
    """`--speculative`, `--num-drafts`, `--draft-model`."""
    group.add_argument(
        "--speculative",
        choices=METHODS,
        help="Draft tokens, from the request's own text or by a smaller model, and verify them in one step.",
    )
    group.add_argument(
        "--num-drafts",
        type=positive_int,
        metavar="N",
        help=f"Draft N tokens of a request in a step.{default_text(DEFAULT_NUM_DRAFTS)}",
    )
    group.add_argument(
        "--draft-model", type=Path, metavar="DIR", help="Draft by the model of this folder, of the same vocabulary."
    )


def read_speculation(args: argparse.Namespace) -> SpeculativeConfig | None:
    """How to draft; None: not at all.

    Raises:
        ValueError: options of speculation without `--speculative`, or not one draft model for `draft-model`.
    """
    if args.draft_model is not None and args.speculative != "draft-model":
        raise ValueError(f"expected --speculative draft-model with --draft-model, got {args.speculative or 'none'}")
    if args.speculative is None:
        if args.num_drafts is not None:
            raise ValueError(f"expected --speculative with --num-drafts {args.num_drafts}, got none")
        return None
    if args.speculative == "draft-model" and args.draft_model is None:
        raise ValueError("expected --draft-model DIR with --speculative draft-model, got none")
    num_drafts = DEFAULT_NUM_DRAFTS if args.num_drafts is None else args.num_drafts
    return SpeculativeConfig(method=METHODS[args.speculative], num_drafts=num_drafts)


__all__ = ["add_speculation_arguments", "read_speculation"]
