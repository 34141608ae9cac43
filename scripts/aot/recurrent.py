"""What cases of all recurrent ops share: a pool of states, and the models that split into so many shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from scripts.aot.arguments import argument

_POOL_BYTES = 1 << 28  # of states: more than VMEM holds, so that they stay in HBM


class ShardedShape(Protocol):
    """A model's layer, of an op's shapes.py."""

    @property
    def name(self) -> str:
        """The model's."""

    def per_shard(self, num_shards: int) -> Any:
        """Its sizes on one shard; ValueError where it does not split so."""


def state_pool(page_shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """Pages of states, at least 128."""
    page_bytes = jnp.dtype(dtype).itemsize * math.prod(page_shape)
    return argument((max(128, _POOL_BYTES // page_bytes), *page_shape), dtype)


def model_settings(shapes: Iterable[ShardedShape], num_shards: int) -> Iterator[tuple[str, list[str]]]:
    """(label, settings) of the models that split into so many shards."""
    for shape in shapes:
        try:
            shape.per_shard(num_shards)
        except ValueError:
            continue
        yield shape.name, [f"model={shape.name}", f"shards={num_shards}"]
