"""Ops are traced under jax's default rules for numbers, whatever rules the application has set.

Flow:    application's call -> [by_default_rules] -> op, which sees none of these flags -> the same program

    jax_enable_x64               numbers without a dtype have 32 bits
    jax_numpy_dtype_promotion    "standard"
    jax_numpy_rank_promotion     "allow"

Without that, 64-bit loop counters and indices would reach kernels, which have 32 bits, and dtypes of results would
depend on a flag. The rules hold while an op is traced, or runs outside `jit`; a compiled step does not pass here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def by_default_rules(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under these rules; arrays of 64 bits that it is given keep their dtype, for it to refuse."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return call
