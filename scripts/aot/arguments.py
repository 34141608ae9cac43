"""Shapes that stand for arguments of what is compiled ahead of time. Imports jax: after `prepare_environment`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def argument(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
