"""Arguments of sampling: how tokens are chosen, and what ends a request.

Flow:    argparse -> [add_sampling_arguments] -> [read_sampling] -> SamplingParams of each prompt
"""

from __future__ import annotations

import argparse

from kvjax.cli.options.fields import add_fields, read_fields
from kvjax.cli.options.types import integer
from kvjax.engine import SamplingParams

NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


def add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    """`--temperature` and the like, penalties, `--stop`, `--ignore-eos`."""
    add_fields(group, SamplingParams, *NAMES, temperature=0.0)
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="Begin all random draws from this seed.")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="End before this text. It may be given several times.",
    )


def read_sampling(args: argparse.Namespace, num_prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt: all the same, but each sample draws with a seed of its own.

    Raises:
        ValueError: several greedy samples of a prompt, or values that `SamplingParams` refuses.
    """
    if args.n > 1 and args.temperature == 0:
        raise ValueError(f"expected --temperature above 0 with --n {args.n}, got 0: greedy samples are all the same")
    return [
        SamplingParams(
            n=args.n,
            max_tokens=args.max_tokens,
            seed=args.seed + i * args.n,
            stop=tuple(args.stop),
            stream_text=bool(args.stop),
            **read_fields(args, SamplingParams, *NAMES),
        )
        for i in range(num_prompts)
    ]


__all__ = ["add_sampling_arguments", "read_sampling"]
