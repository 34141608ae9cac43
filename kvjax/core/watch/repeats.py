"""Counts of a hash that several blocks hold, for those who follow events: it is gone with the last of them.

Flow:    BlockStored of a hash that is known -> `Counter[key] += 1`; BlockRemoved -> [take_repeat]
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

Key = TypeVar("Key")


def take_repeat(repeats: Counter[Key], key: Key) -> bool:
    """Takes one of a key's blocks beyond the first; False: there is none."""
    count = repeats.pop(key, 0)
    if count > 1:
        repeats[key] = count - 1
    return count > 0


__all__ = ["take_repeat"]
