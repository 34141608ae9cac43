"""Jaxprs are equal if they are one function under other names, and different if anything else differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.device.programs.equal_jaxprs import equal_jaxprs

X = np.arange(6, dtype=np.float32)
TABLE = np.arange(6, dtype=np.float32)


def jaxpr_of(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.make_jaxpr(function)(*arguments).jaxpr


def base(x: Any, y: Any) -> Any:
    total = jax.lax.fori_loop(0, 3, lambda i, t: t + jnp.where(x > i, y, 2.0), jnp.zeros_like(x))
    return jnp.sin(total) * 3.0, total


def test_names_do_not_matter() -> None:
    def other(first: Any, second: Any) -> Any:
        return base(first, second)

    assert equal_jaxprs(jaxpr_of(base, X, X), jaxpr_of(other, X, X))


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (lambda x, y: (jnp.sin(base(x, y)[1]) * 4.0, base(x, y)[1]), (X, X)),
    "operands": (lambda x, y: base(y, x), (X, X)),
    "outputs": (lambda x, y: base(x, y)[::-1], (X, X)),
    "shapes": (base, (X[:5], X[:5])),
    "dtypes": (base, (X.astype(np.float16), X.astype(np.float16))),
    "an inner loop": (
        lambda x, y: (lambda t: (jnp.sin(t) * 3.0, t))(
            jax.lax.fori_loop(0, 3, lambda i, t: t + jnp.where(x >= i, y, 2.0), jnp.zeros_like(x))
        ),
        (X, X),
    ),
    "equations": (lambda x, y: (base(x, y)[0] + y, base(x, y)[1]), (X, X)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_everything_else_does(what: str) -> None:
    function, arguments = OTHERS[what]
    assert not equal_jaxprs(jaxpr_of(base, X, X), jaxpr_of(function, *arguments))


def test_zeros_of_both_signs_differ() -> None:
    assert not equal_jaxprs(jaxpr_of(lambda x: x * 0.0, X), jaxpr_of(lambda x: x * -0.0, X))
    assert equal_jaxprs(jaxpr_of(lambda x: x * np.nan, X), jaxpr_of(lambda y: y * np.nan, X))


def test_functions_over_other_constants_differ() -> None:
    """An inner function brings its constants along, or they are inputs of the whole: never taken for equal by size."""

    def adds(table: np.ndarray) -> Any:
        return jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + table, None), x, None, length=2)[0])(X)

    same, other = adds(TABLE), adds(TABLE + 1)
    assert equal_jaxprs(same.jaxpr, adds(TABLE).jaxpr)
    is_equal = equal_jaxprs(same.jaxpr, other.jaxpr)
    assert not is_equal or any(a is not b for a, b in zip(same.consts, other.consts, strict=True))
