"""Transfers that a function is there for: an application's transfer guard does not forbid them.

Flow:    numpy arrays -> [hands_over] -> compiled program;   arrays on a device -> [reads_back] -> numpy arrays
Source:  `jax.transfer_guard`: "disallow" forbids what is not explicit, so also numpy arguments of compiled programs

`jax.device_put` and `jax.device_get` would be explicit, at the cost of some 50 us an array and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def hands_over(function: Callable[P, R]) -> Callable[P, R]:
    """`function` may give its numpy arrays to compiled programs."""
    return _allowing(jax.transfer_guard_host_to_device, function)


def reads_back(function: Callable[P, R]) -> Callable[P, R]:
    """`function` may read arrays of a device."""
    return _allowing(jax.transfer_guard_device_to_host, function)


def _allowing(guard: Callable[[str], AbstractContextManager[Any]], function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with guard("allow"):
            return function(*args, **kwargs)

    return call


__all__ = ["hands_over", "reads_back"]
