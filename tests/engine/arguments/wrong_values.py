"""Values of wrong types and out of every range, as callers and JSON bring them."""

from __future__ import annotations

import decimal
import fractions
from typing import Any

import jax.numpy as jnp
import numpy as np


class Odd:
    """An object of the caller's own, whose methods raise."""

    def __repr__(self) -> str:
        raise RuntimeError("planted in repr")

    def __float__(self) -> float:
        raise ValueError("planted in float")


WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, ..., int, Odd(), np.bool_(True)),
    *("", "x", "1", "high", "\ud800", b"x", bytearray(b"1"), np.str_("a")),
    *(0, -1, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**31), -(2**63), -(2**64), 10**30, 10**5000),
    *(0.0, 0.5, 1.5, -0.5, 1e-320, 1e-46, 1e39, 1e300, float("nan"), float("inf"), -float("inf"), 1j),
    *(
        np.int8(-1),
        np.int64(3),
        np.uint64(2**63),
        np.float16(0.5),
        np.float32("nan"),
        np.float64("inf"),
        jnp.float32(0.5),
    ),
    *(np.array(3), np.array(0.5), np.array([1, 2]), np.array([0.5]), np.array([]), np.zeros((2, 2)), np.array([None])),
    *(
        [],
        [1],
        [[1]],
        [[1], [2, 3]],
        [None],
        ["a"],
        [1.5],
        [2**70],
        (),
        (1, 2),
        (None,),
        set(),
        {1},
        range(3),
        iter([1]),
    ),
    *({}, {"a": 1}, {1: "a"}, {1: None}, {1: 1.5}, {None: 1.0}, {2**70: 1.0}, {-1: 1.0}),
    *(decimal.Decimal("0.5"), decimal.Decimal("nan"), fractions.Fraction(1, 2)),
)
