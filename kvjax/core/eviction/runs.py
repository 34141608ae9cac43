"""Runs of blocks that were last used together: their arrays, the lists in which they wait, who stands on whom.

Flow:    RunKeeper -> [Runs] -> the oldest run of each class

A run's number is its place in every array; 0 is none. Numbers 1 to `num_lists` are the heads of lists, rings through
two arrays, so that a run leaves from the middle of one at no cost. A run in no list is a ring by itself.

    waiting, in the list of its class -(first there, has children)-> set aside, in the last list
                     ^-------------(the last child goes: to the head)--------'

Invariants (`check_invariants`):

    U1  `after` and `before` are inverse; a run in a list waits; one that is set aside has children
    U2  `children` counts the runs whose `parent` one is; the runs in use are those that have blocks
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.errors import InvariantError

NO_BLOCKS = np.zeros(0, np.int64)
FIRST_SIZE = 64


class Runs:
    """All runs of one pool: class i waits in list i + 1. A call costs some 100 ns; memory is 90 bytes a run."""

    def __init__(self, num_lists: int) -> None:
        self.num_lists = num_lists  # the last one is of those set aside
        self.end = num_lists + 1  # numbers from here on were never used
        self.group = [0] * FIRST_SIZE
        self.num_hits = [0] * FIRST_SIZE
        self.of_class = np.zeros(FIRST_SIZE, np.int64)
        self.free_since = np.zeros(FIRST_SIZE, np.int64)  # clock
        self.waits = np.zeros(FIRST_SIZE, np.bool_)  # nobody holds it
        self.num_cached = [0] * FIRST_SIZE  # blocks
        self.num_gone = [0] * FIRST_SIZE  # evicted blocks that are remembered
        self.parent = [0] * FIRST_SIZE  # the run before it in a prefix; 0: none is known
        self.children = [0] * FIRST_SIZE  # cached ones
        self.is_aside = [False] * FIRST_SIZE
        self.after = list(range(FIRST_SIZE))
        self.before = list(range(FIRST_SIZE))
        self.blocks = [NO_BLOCKS] * FIRST_SIZE  # int64[n] where it waits, last block first; some may have left it
        self._unused: list[int] = []

    def make(self, group: int, of_class: int, num_hits: int, num_cached: int) -> int:
        """A run that stands on none."""
        run = self._unused.pop() if self._unused else self._next_number()
        self.group[run], self.of_class[run], self.num_hits[run] = group, of_class, num_hits
        self.num_cached[run] = num_cached
        return run

    def _next_number(self) -> int:
        size = len(self.after)
        if self.end == size:
            for name, values in vars(self).items():
                if isinstance(values, np.ndarray):
                    setattr(self, name, np.concatenate((values, np.zeros(size, values.dtype))))
            for counts in (self.group, self.num_hits, self.num_cached, self.num_gone, self.parent, self.children):
                counts += [0] * size
            self.is_aside += [False] * size
            self.blocks += [NO_BLOCKS] * size
            for neighbours in (self.after, self.before):
                neighbours += range(size, 2 * size)
        self.end += 1
        return self.end - 1

    def drop(self, run: int) -> None:
        """Lets a run go that has no blocks, cached or gone."""
        self.leave(run)
        self.put_on(run, 0)
        if self.children[run]:
            self.parent = [0 if parent == run else parent for parent in self.parent]
            self.children[run] = 0
        self.waits[run] = False
        self.blocks[run] = NO_BLOCKS
        self._unused.append(run)

    # Who stands on whom.

    def put_on(self, run: int, parent: int) -> None:
        """Says which run comes before one in a prefix, 0: none that is known, and nobody waits for it to go."""
        old = self.parent[run]
        if old == parent:
            return
        self.parent[run] = parent
        if parent:
            self.children[parent] += 1
        if old:
            self.children[old] = left = self.children[old] - 1
            if not left and self.is_aside[old]:
                self.leave(old)
                self._insert(old, head := 1 + self.of_class.item(old), self.after[head])

    def replace(self, run: int, other: int) -> None:
        """Lets another run that stands on none stand where one stands, and the one on the other if it waits to go."""
        self.parent[other], self.parent[run] = self.parent[run], 0
        if self.is_listed(run):
            self.put_on(run, other)

    def set_aside(self, run: int) -> None:
        """Moves a run from the list of its class into the last one."""
        self.leave(run)
        self._insert(run, self.before[self.num_lists], self.num_lists)
        self.is_aside[run] = True

    # Lists.

    def wait(self, run: int, blocks: np.ndarray, now: int) -> None:
        """Puts a run whose blocks (int64[n], the last one first) are free at the end of the list of its class.

        If it waits already, these are more of its blocks.
        """
        if self.is_listed(run):
            self.leave(run)
            blocks = np.concatenate((self.blocks[run], blocks))
        self.blocks[run], self.free_since[run], self.waits[run] = blocks, now, True
        head = 1 + self.of_class.item(run)
        self._insert(run, self.before[head], head)

    def _insert(self, run: int, left: int, right: int) -> None:
        self.before[run], self.after[run] = left, right
        self.after[left] = self.before[right] = run

    def leave(self, run: int) -> None:
        """Takes a run out of the list that it is in, if it is in one."""
        left, right = self.before[run], self.after[run]
        self.after[left], self.before[right] = right, left
        self.before[run] = self.after[run] = run
        self.is_aside[run] = False

    def is_listed(self, run: int) -> bool:
        """Whether it is in a list."""
        return self.after[run] != run

    def first(self, a_list: int) -> int:
        """The head of a list, 0 where it is empty."""
        run = self.after[a_list]
        return run if run != a_list else 0

    def state(self) -> tuple[Any, ...]:
        """All that is known of runs, but for the blocks that wait."""
        arrays = tuple(tuple(values.tolist()) for values in (self.of_class, self.free_since, self.waits))
        lists = (self.group, self.num_hits, self.num_cached, self.num_gone, self.parent, self.after)
        return (*arrays, *(tuple(values) for values in lists), tuple(self.is_aside))

    def check_invariants(self) -> None:
        """Raises InvariantError if U1 or U2 is broken. O(runs)."""
        children = [0] * len(self.parent)
        unused = set(self._unused)
        for run in range(len(self.after)):
            if self.before[self.after[run]] != run or self.after[self.before[run]] != run:
                raise InvariantError(f"U1: the neighbours of run {run} in a list differ")
            if run > self.num_lists and self.is_listed(run) and not self.waits[run]:
                raise InvariantError(f"U1: run {run} is in a list and does not wait")
            if self.is_aside[run] and not self.children[run]:
                raise InvariantError(f"U1: run {run} is set aside and has no children")
            is_used = self.num_lists < run < self.end and run not in unused
            if is_used != (self.num_cached[run] + self.num_gone[run] > 0):
                raise InvariantError(f"U2: run {run} has no blocks and is in use, or has some and is not")
            children[self.parent[run]] += 1
        if children[1:] != self.children[1:]:
            raise InvariantError("U2: the children of a run are counted wrongly")


__all__ = ["NO_BLOCKS", "Runs"]
