"""Which units the disks of all processes have: every process gives the same answer at the same step.

Flow:    TierScheduler.holds -> [CommonIndex.has]; stores, loads and losses that all processes know of -> [CommonIndex]

Disks are each process's own, and so is what is written, skipped or deleted there. The index follows what all processes
know alike, and passes over what only one of them knows: a unit that is missing on one of the disks fails to load, and
is given up. It counts fewer bytes than a disk holds, so what it has forgotten is what disks delete first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from kvjax.tiers.stores.disk_store import KEPT_SHARE, name_of
from kvjax.tiers.units import UnitKey

_FILE_BYTES = 256  # of a file beside its unit, or fewer
_HASH_BITS = 48
_SHARE = KEPT_SHARE - 0.05  # of a disk's bytes: after deleting, it has the units counted here and some more


class CommonIndex:
    """An index of the units that lie on one set of disks. Owned by the scheduler's thread."""

    def __init__(self, max_bytes: int, bytes_of_group: Sequence[int]) -> None:
        """`bytes_of_group`: of a unit, on the disk that has most of it. `max_bytes`: of that disk."""
        self._most_bytes = int(max_bytes * _SHARE)
        self._bytes_of_group = tuple(size + _FILE_BYTES for size in bytes_of_group)
        self._names: OrderedDict[int, None] = OrderedDict()  # those used longest ago first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def has(self, key: UnitKey) -> bool:
        """Whether all disks may have the unit."""
        return short_name(key) in self._names

    def start(self, names: Iterable[int]) -> None:
        """What all disks have when they are opened, those used longest ago first."""
        for name in names:
            self._put(name)

    def use(self, keys: Iterable[UnitKey], *, on_probation: bool = False) -> None:
        """Units have been written, or read; new ones on probation are forgotten first."""
        for key in keys:
            self._put(short_name(key), is_last=not on_probation)

    def forget(self, keys: Iterable[UnitKey]) -> None:
        """Units could not be read."""
        for key in keys:
            self.forget_name(short_name(key))

    def forget_name(self, name: int) -> None:
        """A unit was not written."""
        if name in self._names:
            del self._names[name]
            self._num_bytes -= self._size(name)

    def _put(self, name: int, *, is_last: bool = True) -> None:
        if is_new := name not in self._names:
            self._names[name] = None
            self._num_bytes += self._size(name)
        if is_new or is_last:
            self._names.move_to_end(name, is_last)
        while self._num_bytes > self._most_bytes:
            oldest, _ = self._names.popitem(last=False)
            self._num_bytes -= self._size(oldest)

    def _size(self, name: int) -> int:
        return self._bytes_of_group[name >> _HASH_BITS]


def short_name(key: UnitKey) -> int:
    """A number for a unit: its group, and bits of its hash. Where two units had one, the second would fail to load."""
    return number_of(name_of(key))


def number_of(name: str) -> int:
    """As `short_name`, of a unit's file."""
    group_id = int(name.partition("-")[0])
    return group_id << _HASH_BITS | xxhash.xxh3_64_intdigest(name.encode()) >> (64 - _HASH_BITS)


def in_all(names: Sequence[np.ndarray]) -> np.ndarray:  # uint64[n] of each disk -> those in all, in the first's order
    """Units that every disk has."""
    first, *others = names
    is_everywhere = np.ones(first.size, bool)
    for other in others:
        is_everywhere &= np.isin(first, other)
    return first[is_everywhere]


__all__ = ["CommonIndex", "in_all", "number_of", "short_name"]
