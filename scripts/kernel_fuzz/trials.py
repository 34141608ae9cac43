"""What a trial is, how its functions run on a platform, and which lengths try a kernel hardest.

Flow:    trial of an op: random generator, platform -> [compiled_on], [hard_rows] -> cases, one description each

A trial compiles an op once, for a static shape and options that it draws, and then checks several steps of that shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from pallas_kernels.cases.case import Case, Results
from pallas_kernels.cases.numbers import one_of
from pallas_kernels.interpret import compile_for

# Yields what each case was after it was right; an error of a case says which it was.
Trial: TypeAlias = Callable[[np.random.Generator, str], Iterator[str]]
Rows: TypeAlias = list[tuple[int, int]]  # (query length, sequence length)

PLAIN = ("reference", "xla", "triton")  # platforms that take pages of any size
_STEPS = 4
_RACES_WATCHED = 0.2  # of the trials: it doubles the time of an interpreted kernel


def compiled_on(
    platform: str, rng: np.random.Generator, function: Callable[..., Any], *arguments: Any
) -> Callable[..., Any]:
    """`function` for arguments of these shapes on a platform of scripts/fuzz_kernels.py; calls give numpy arrays."""
    watch = bool(rng.random() < _RACES_WATCHED)
    return compile_for(platform, function, *arguments, watch_races=watch)


def of_case_type(case_type: type[Case], rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of a random case, compiled once."""
    case = case_type.random(rng, platform)
    call = partial(case.call, platform)
    run = compiled_on(platform, rng, call, *case.hard_arguments(rng))
    for step in range(_STEPS):
        arguments = case.hard_arguments(rng)

        def check(arguments: Any = arguments) -> None:
            case.assert_right(Results(*run(*arguments)), arguments)

        yield checked((case, step), check)


def checked(what: Any, check: Callable[[], None]) -> str:
    """Runs `check`; an error says what it was of."""
    try:
        check()
    except BaseException as error:
        error.add_note(f"of {what}")
        raise
    return str(what)


def hard_lengths(page_size: int, longest: int) -> list[int]:
    """Sequence lengths at which blocks, pages and tiles end, and their neighbours."""
    edges = {0, 1, 2, longest, longest - 1}
    for size in (page_size, 8, 16, 64, 128, 256, 512):
        edges |= {size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    return sorted(n for n in edges if 0 <= n <= longest)


def hard_rows(
    rng: np.random.Generator, num_tokens: int, num_rows: int, page_size: int, longest: int, may_be_blind: bool
) -> Rows:
    """Rows that fit: one token, ends of tiles and pages, none; `may_be_blind`: fewer tokens than queries, too."""
    lengths = hard_lengths(page_size, longest)
    style = one_of(rng, ["decode", "edges", "prefill", "one", "blind", "none", "mixed", "mixed"])
    rows: Rows = []
    left = num_tokens
    count = {"none": 0, "one": 1, "prefill": 1}.get(style, int(rng.integers(1, num_rows + 1)))
    for _ in range(min(count, num_rows)):
        q_len = _query_length(rng, style, left, page_size)
        seq_len = one_of(rng, lengths) if rng.random() < 0.7 else int(rng.integers(0, longest + 1))
        if not (may_be_blind and (style == "blind" or rng.random() < 0.1)):
            seq_len = max(seq_len, q_len)
        q_len = min(q_len, longest)
        rows.append((q_len, min(seq_len, longest)))
        left -= q_len
    return sorted(rows, key=lambda row: row[0] > 1)


def _query_length(rng: np.random.Generator, style: str, left: int, page_size: int) -> int:
    if style in ("decode", "one") or left <= 1:
        return min(left, int(rng.random() < 0.9))
    if style == "prefill":
        return left
    near = [n + d for n in (8, 16, 32, page_size) for d in (-1, 0, 1)]
    choices = [0, 1, 1, 2, int(rng.integers(0, left + 1)), one_of(rng, near)]
    return min(left, max(0, one_of(rng, choices)))
