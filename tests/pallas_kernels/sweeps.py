"""Random sweeps of the kernels: what `scripts/sweep_kernels.py` and the tests marked `sweep` run.

Flow:    tests/pallas_kernels/<op>/sweep.py: SWEEPS -> [find_sweeps] -> (op, backend) -> sweep of a seed

A sweep checks the cases of one seed, compiled or interpreted with races watched (on_tpu.py, on_gpu.py), and yields
after each of them; a case that is wrong raises.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import tests.pallas_kernels
from tests.pallas_kernels.cases import pairwise

Sweep: TypeAlias = Callable[[int], Iterator[None]]


def find_sweeps() -> dict[tuple[str, str], Sweep]:
    """The sweep of each (op, backend) that has one."""
    found = {}
    for package in pkgutil.iter_modules(tests.pallas_kernels.__path__):
        name = f"tests.pallas_kernels.{package.name}.sweep"
        if package.ispkg and importlib.util.find_spec(name) is not None:
            for backend, sweep in importlib.import_module(name).SWEEPS.items():
                found[package.name, backend] = sweep
    return found


def choices(factors: dict[str, Sequence[Any]], seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number that no other choice of any seed has, choice): every pair of levels of two factors."""
    return ((1000 * seed + index, choice) for index, choice in enumerate(pairwise(factors, seed)))


def two_steps(
    factors: dict[str, Sequence[Any]], compiled: Callable[[int, dict[str, Any]], Callable[[int], None]]
) -> Sweep:
    """The sweep of two random steps of every choice: `compiled(number, choice)` gives the check of a seed's step."""

    def sweep(seed: int) -> Iterator[None]:
        for number, choice in choices(factors, seed):
            with naming(choice, "compilation"):
                check = compiled(number, choice)
            for step in range(2):
                with naming(choice, step):
                    check(10 * number + step)
                yield

    return sweep


@contextmanager
def naming(choice: dict[str, Any], case: Any = "") -> Iterator[None]:
    """An error inside says which case it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of {choice}, case {case}")
        raise
