"""Which shards a shape splits into: every shapes.py says it by `per_shard`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.kernel_bench.case import Sizes

_MOST = 8


def splits(shape: Any, num_shards: int) -> bool:
    """Whether the shape splits into so many."""
    try:
        shape.per_shard(num_shards)
    except ValueError:
        return False
    return True


def with_most_shards(shape: Any, sizes: Sizes) -> Sizes:
    """The sizes with as few heads as the shape gives."""
    return replace(sizes, shards=max(n for n in range(1, _MOST + 1) if splits(shape, n)))
