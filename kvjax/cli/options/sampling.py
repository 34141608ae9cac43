"""Arguments of sampling: how tokens are chosen, and what ends a request.

Flow:    argparse -> [add_sampling_arguments] -> [read_sampling] -> SamplingParams of each prompt
"""

from __future__ import annotations

import argparse

from kvjax.cli.options.types import non_negative_float
from kvjax.engine import SamplingParams


def add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    """`--temperature` and the like, penalties, `--stop`, `--ignore-eos`."""
    group.add_argument("--temperature", type=non_negative_float, default=0.0, metavar="T", help="0 is greedy (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus of probability P (1)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K best tokens (0: all)")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="only tokens of at least P times the best's probability"
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="taken from logits of tokens in the output (0)"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="taken as often as they are in the output (0)"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides positive logits of tokens in prompt or output, multiplies negative ones (1)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random draws (0)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


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
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed + i * args.n,
            stop=tuple(args.stop),
            stream_text=bool(args.stop),
            ignore_eos=args.ignore_eos,
        )
        for i in range(num_prompts)
    ]


__all__ = ["add_sampling_arguments", "read_sampling"]
