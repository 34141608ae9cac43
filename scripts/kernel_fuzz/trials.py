"""What a trial is, how its functions run on a platform, and what its cases are.

Flow:    trial of an op: random generator, platform -> [compiled_on] -> cases, one description each

A trial compiles an op once, for a static shape and options that it draws, and then checks several steps of that shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from pallas_kernels.cases.case import Case, Results
from pallas_kernels.interpret import compile_for

# Yields what each case was after it was right; an error of a case says which it was.
Trial: TypeAlias = Callable[[np.random.Generator, str], Iterator[str]]

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
