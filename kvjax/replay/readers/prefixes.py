"""Hash ids such that each stands for a whole prefix, whatever a file's ids stand for.

Flow:    input lengths, ids of a file -> [block_size_of, Numbering] -> TraceRequest.hash_ids

Two rules are in use for a last block that is not full: an id of its own, or none. Where it has none its tokens are a
tail that no other prompt has. Ids that name contents alone, or that do not fit, are numbered anew by what is before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from kvjax.errors import TraceError
from kvjax.replay.requests.trace import TRACE_BLOCK_SIZE, num_ids

SIZES = (TRACE_BLOCK_SIZE, 256, 128, 64, 32, 16)  # that are tried, the first that fits is taken


@dataclass(frozen=True)
class FileIds:
    """The hash ids of a file's prompts, or of a session's."""

    prompts: Sequence[Sequence[int]]
    counts: np.ndarray  # int64[prompts]
    flat: np.ndarray | None  # int64[sum of counts]; None: an id is too large

    @classmethod
    def of(cls, places: Sequence[str], values: Sequence[Any]) -> FileIds:
        """`values`, if all are lists of integers >= 0."""
        if set(map(type, values)) != {list} or set(map(type, chain.from_iterable(values))) - {int}:
            _refuse_ids(places, values)
        counts = np.array(list(map(len, values)), np.int64)
        try:
            flat = np.fromiter(chain.from_iterable(values), np.int64, int(counts.sum()))
        except OverflowError:
            flat = None
        if (min(chain.from_iterable(values)) if flat is None else flat.min(initial=0)) < 0:
            _refuse_ids(places, values)
        return cls(values, counts, flat)

    def num_covering(self, most: int) -> int | None:
        """How many ids from 0 on hold all, if each follows the same id everywhere: then it stands for a prefix.

        None: one follows different ids, or they are more than `most`.
        """
        if self.flat is None or (num_ids := int(self.flat.max(initial=-1)) + 1) > most:
            return None
        before = np.empty_like(self.flat)
        before[1:] = self.flat[:-1]
        before[(np.cumsum(self.counts) - self.counts)[self.counts > 0]] = -1
        parents = np.empty(num_ids, np.int64)
        parents[self.flat] = before
        return num_ids if np.array_equal(parents[self.flat], before) else None


def _refuse_ids(places: Sequence[str], values: Sequence[Any]) -> None:
    for place, ids in zip(places, values, strict=True):
        if type(ids) is not list or not all(type(value) is int and value >= 0 for value in ids):
            raise TraceError(f"{place}: expected hash_ids to be a list of integers >= 0, got {repr(ids)[:40]}")


def block_size_of(places: Sequence[str], lengths: Sequence[int], ids: FileIds, given: int | None) -> int:
    """Tokens of a hash id: `given`, or the size by which all rows have the ids that they should.

    Raises:
        TraceError: a row has too many ids or too few, by the size that fits the rows before.
    """
    tokens = np.array(lengths, np.int64)
    best, reached = TRACE_BLOCK_SIZE, -1
    for size in SIZES if given is None else (given,):
        for expected in (-(-tokens // size), tokens // size):
            misfits = np.flatnonzero(ids.counts != expected)
            if not misfits.size:
                return size
            if misfits[0] > reached:
                best, reached = size, int(misfits[0])
    raise TraceError(
        f"{places[reached]}: expected {-(-lengths[reached] // best)} hash_ids for {lengths[reached]} tokens (one per "
        f"{best}), got {ids.counts[reached]}; give --hash-block-size if a block has another number of tokens"
    )


class Numbering:
    """Hands out hash ids of one trace, none twice for two prefixes."""

    def __init__(self, hash_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self.is_anew = False  # ids of the file were replaced, not moved
        self._next = 0

    def fresh(self, count: int) -> range:
        """Ids that nothing has.

        Raises:
            TraceError: there are not that many.
        """
        start, self._next = self._next, self._next + count
        most = num_ids(self.hash_block_size)
        if self._next > most:
            raise TraceError(
                f"expected at most {most:,} different blocks of {self.hash_block_size} tokens, got more; read fewer "
                "requests with --num-requests"
            )
        return range(start, self._next)

    def prefixes(
        self, lengths: Sequence[int], ids: FileIds, known: dict[tuple[int, int], int] | None = None
    ) -> list[tuple[int, ...]]:
        """Ids of prompts in which equal ids meant equal blocks; a tail without an id gets one.

        They are the file's own, moved on, where each always follows the same id and there is room for them. `known`:
        of an earlier call, in which the same ids meant the same: id of ours before, id of the file -> id of ours.
        """
        num_own = None if known is not None else ids.num_covering(num_ids(self.hash_block_size) - self._next)
        if num_own is None:
            self.is_anew = True
            found = self._numbered_anew(ids.prompts, {} if known is None else known)
        elif self._next:
            moved = list(self.fresh(num_own))
            found = [tuple(map(moved.__getitem__, prompt)) for prompt in ids.prompts]
        else:
            self.fresh(num_own)
            found = list(map(tuple, ids.prompts))
        for place in np.flatnonzero(ids.counts * self.hash_block_size < np.array(lengths, np.int64)).tolist():
            found[place] += (self.fresh(1).start,)
        return found

    def _numbered_anew(
        self, prompts: Iterable[Iterable[int]], known: dict[tuple[int, int], int]
    ) -> list[tuple[int, ...]]:
        found = []
        for ids in prompts:
            before, path = -1, []
            for own_id in ids:
                if (before, own_id) not in known:
                    known[before, own_id] = self.fresh(1).start
                before = known[before, own_id]
                path.append(before)
            found.append(tuple(path))
        return found


__all__ = ["FileIds", "Numbering", "block_size_of"]
