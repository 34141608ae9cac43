"""A share of the heads: what one process sends of an array of entries, or wants of it.

Flow:    shares of sender and receiver -> [HeadPart.overlap] -> [on_host] -> bytes -> the receiver's arrays

With 8 heads, 2 processes that send and 4 that receive:

    sender    |  0  1  2  3  |  4  5  6  7  |
    receiver  |  0  1 |  2  3 |  4  5 |  6  7 |    each head of a receiver comes from one sender: no byte travels twice
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

HEADS = 1  # dimension of arrays of entries


class HeadPart(NamedTuple):
    """Parts `first` to `stop - 1` of the heads split into `num_parts`."""

    first: int
    stop: int
    num_parts: int

    def heads(self, num_heads: int) -> range:
        """The heads of this part.

        Raises:
            ValueError: they do not split so.
        """
        if num_heads % self.num_parts:
            raise ValueError(f"expected a number of parts that divides {num_heads} heads, got {self.num_parts}")
        size = num_heads // self.num_parts
        return range(self.first * size, self.stop * size)


ALL = HeadPart(0, 1, 1)


def overlap(one: range, other: range) -> range:
    """What two ranges of heads share."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def on_host(array: jax.Array, heads: range | None) -> np.ndarray:
    """Those heads of an array of entries [n, heads, ...], which lie in this process; None: the whole array.

    Heads are counted over all processes. Copies from the devices what holds them.
    """
    if heads is None:
        return np.ascontiguousarray(jax.device_get(array.addressable_data(0)))
    found: dict[int, np.ndarray] = {}
    for shard in array.addressable_shards:
        start = shard.index[HEADS].start or 0
        own = range(start, start + shard.data.shape[HEADS])
        both = overlap(own, heads)
        if start not in found and both:
            found[start] = jax.device_get(shard.data)[:, both.start - start : both.stop - start]
    parts = [found[start] for start in sorted(found)]
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=HEADS))


__all__ = ["ALL", "HeadPart", "on_host", "overlap"]
