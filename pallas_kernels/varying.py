"""Loop carries inside `jax.shard_map`: a carry must vary over the mesh axes that its update varies over."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

_Tree = TypeVar("_Tree")


def vary_like(carry: _Tree, *sources: Any) -> _Tree:
    """`carry` unchanged in value, varying over every mesh axis that a leaf of it or of `sources` varies over.

    It adds a zero that is made like each of them, which is free outside `shard_map`, where nothing varies. Arrays of
    known values do not; a zero made like one would have its sharding, which no scalar can.
    """
    zeros = [
        jnp.zeros_like(leaf, dtype=jnp.float32, shape=())
        for leaf in jax.tree.leaves((carry, sources))
        if isinstance(leaf, jax.core.Tracer)
    ]
    if not zeros:
        return carry
    zero = sum(zeros[1:], zeros[0])
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), carry)
