"""What happens to cached blocks, kept by runs: who was hit again, who waits, who was evicted, and who goes next.

Flow:    LearnedOrder -> [RunKeeper.note_use, note_release, note_eviction, learn] -> [worst_first] -> victims

A *run* is what was last used together and has one past: neighbours in a prefix, in one group. It is the unit of
learning, however many blocks it has: a hit is one event of each run that it takes blocks of.

    free for the first time    -> a run that was never hit
    hit, all of its blocks     -> the same run, hit once more
    hit, some of its blocks    -> these become a run of their own, hit once more; the others stay as they were
    evicted                    -> its blocks are ghosts, for which it goes on waiting
    a ghost is computed again  -> as if it had been hit when it is free again

A run waits from the moment at which it became free. A hit of one that waits is a use at that age; a loss is one that is
forgotten. What somebody holds neither waits nor is used.

Runs of each class stand in a list by the time at which they became free. Only the first of each list may go: of these
the one that is worth least, and of equal ones the oldest. A run outlives those that stand on it in a prefix: it is set
aside while they are cached.

Invariants (`check_invariants`):

    R1  `num_cached` and `num_gone` of `Runs` are what blocks and ghosts say; U1 and U2 of `Runs`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvjax.core.eviction.ghosts import Ghosts
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.learned_table import NUM_CLASSES, LearnedTable, bin_of, class_of
from kvjax.core.eviction.runs import Runs
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError


class RunKeeper:
    """The runs of one pool. Some 5 us a request and 2 us an evicted run; no block costs work in Python."""

    def __init__(self, index: HashedBlocks, max_ghosts: int, learn_every: int) -> None:
        self._index = index
        self._learn_every = learn_every  # requests
        self.run_of = np.zeros(index.is_hashed.size, np.int64)  # of each cached block; 0: none yet
        self.runs = Runs(NUM_CLASSES + 1)
        self.ghosts = Ghosts(max_ghosts)
        self.table = LearnedTable()

    # What happened.

    def note_use(self, ids: np.ndarray, now: int) -> None:
        """Hashed blocks, in the order of their prefixes, were hit at a clock."""
        runs = self.runs
        for group, part in self._by_group(ids):
            for run, blocks in _stretches(self.run_of[part], part):
                if run and runs.waits.item(run):
                    self.table.note_use(runs.of_class.item(run), now - runs.free_since.item(run))
                if run and blocks.size == runs.num_cached[run] + runs.num_gone[run]:
                    runs.num_hits[run] = num_hits = runs.num_hits[run] + 1
                    runs.of_class[run] = class_of(num_hits)
                    runs.waits[run] = False
                    runs.leave(run)
                else:
                    self._split(group, run, blocks)

    def _split(self, group: int, run: int, blocks: np.ndarray) -> None:
        """Makes blocks of a run, 0: of none, one of their own that was hit once more."""
        made = self._make(group, self.runs.num_hits[run] + 1, blocks)
        if run:
            self.runs.replace(run, made)
            self._remove_blocks(run, blocks.size)
            self._drop_others_blocks(run)

    def _drop_others_blocks(self, run: int) -> None:
        """Keeps in a run that waits only the blocks that are still its own."""
        if self.runs.is_listed(run):
            blocks = self.runs.blocks[run]
            self.runs.blocks[run] = blocks[self.run_of[blocks] == run]

    def _make(self, group: int, num_hits: int, blocks: np.ndarray) -> int:
        self.run_of[blocks] = made = self.runs.make(group, class_of(num_hits), num_hits, blocks.size)
        return made

    def _remove_blocks(self, run: int, num_cached: int = 0, num_gone: int = 0) -> None:
        runs = self.runs
        runs.num_cached[run] = cached = runs.num_cached[run] - num_cached
        runs.num_gone[run] = gone = runs.num_gone[run] - num_gone
        if not cached:
            runs.leave(run)
            runs.put_on(run, 0)
            if not gone:
                runs.drop(run)

    def note_release(self, ids: np.ndarray, now: int) -> None:
        """Hashed blocks became free at a clock, each request's last one first."""
        for group, part in self._by_group(ids):
            child = 0
            for run, blocks in _stretches(self.run_of[part], part):
                for made, of_run in ((run, blocks),) if run else self._make_released(group, blocks, now):
                    self.runs.wait(made, of_run, now)
                    if child and child != made:
                        self.runs.put_on(child, made)
                    child = made

    def _make_released(self, group: int, blocks: np.ndarray, now: int) -> list[tuple[int, np.ndarray]]:
        """Runs of blocks of a prefix that were in none, and their blocks, the last run first."""
        if not self.ghosts.remembers(group, self._index.hash_of(blocks.item(-1))):
            return [(self._make(group, 0, blocks), blocks)]
        hashes = self._index.hashes_of(blocks[::-1])
        found: list[tuple[int, np.ndarray]] = []
        left = blocks.size
        while left:
            num_hits, count = self._bring_back(group, hashes, blocks.size - left, now)
            of_run = blocks[left - count : left]
            found.insert(0, (self._make(group, num_hits, of_run), of_run))
            left -= count
        return found

    def _bring_back(self, group: int, hashes: list[BlockHash], start: int, now: int) -> tuple[int, int]:
        """Hits so far of the blocks from `start` on, and how many have as many: of a ghost, or all the rest."""
        runs = self.runs
        run, count, rest = self.ghosts.claim(group, hashes, start)
        if not run:
            return 0, len(hashes) - start
        self.table.note_use(runs.of_class.item(run), now - runs.free_since.item(run))
        num_hits = runs.num_hits[run] + 1
        if rest:
            self._remember(run, rest, now)
        self._remove_blocks(run, num_gone=count + len(rest))
        return num_hits, count

    def leave_runs(self, ids: np.ndarray) -> np.ndarray:  # int64[n]
        """The runs of blocks that were evicted, which are in none from then on."""
        of_runs = self.run_of[ids]
        self.run_of[ids] = 0
        return of_runs

    def note_eviction(self, of_blocks: list[np.ndarray], hashes: list[BlockHash], now: int) -> None:
        """Blocks left these runs, the last one of each first, and had these hashes, all lost up to a clock."""
        of_runs = of_blocks[0] if len(of_blocks) == 1 else np.concatenate(of_blocks)
        end = len(hashes)
        hashes.reverse()
        for run, part in _stretches(of_runs, of_runs):
            if run:
                self._remember(run, hashes[end - part.size : end], now)
                self._remove_blocks(run, num_cached=part.size)
            end -= part.size

    def _remember(self, run: int, hashes: list[BlockHash], now: int) -> None:
        runs = self.runs
        runs.num_gone[run] += len(hashes)
        for lost, count in self.ghosts.add(runs.group[run], run, hashes):
            if not runs.num_cached[lost] and runs.num_gone[lost] == count:
                self.table.note_loss(runs.of_class.item(lost), now - runs.free_since.item(lost))
            self._remove_blocks(lost, num_gone=count)

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Blocks are cached no more, and no ghosts."""
        stretches = _stretches(self.run_of[ids], ids)
        self.run_of[ids] = 0
        for run, blocks in stretches:
            if run:
                self._remove_blocks(run, num_cached=blocks.size)
                self._drop_others_blocks(run)

    def _by_group(self, ids: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """Stretches of blocks of one group each."""
        return _stretches(self._index.groups_of(ids), ids) if self._index.has_groups else ((0, ids),)

    # What goes next.

    @property
    def due_at(self) -> int:
        """The clock from which on it is time to `learn`."""
        return self.table.rebuilt_at + self._learn_every

    def learn(self, now: int) -> None:
        """Lets the table learn what happened."""
        waiting = self.runs.waits.nonzero()[0]
        self.table.rebuild(now, self.runs.of_class[waiting], now - self.runs.free_since[waiting])

    def take_worst(self, now: int) -> np.ndarray | None:  # int64[n]
        """The blocks that wait of the run that goes next, the last one first; the run stands in no list any more."""
        runs = self.runs
        while run := self._worst(now):
            if not runs.children[run]:
                break
            runs.set_aside(run)
        else:
            run = runs.first(runs.num_lists)
        if not run:
            return None
        runs.leave(run)
        runs.put_on(run, 0)
        return runs.blocks[run]

    def _worst(self, now: int) -> int:
        """The run that is worth least of the first of each class, of equal ones the oldest; 0: there is none."""
        runs = self.runs
        worst, least, oldest = 0, math.inf, 0
        for head, worth in enumerate(self.table.worth, 1):
            run = runs.after[head]
            if run != head:
                since = runs.free_since.item(run)
                value = worth[bin_of(now - since)]
                if value < least or (value == least and since < oldest):
                    worst, least, oldest = run, value, since
        return worst

    # For people and tests.

    def state(self) -> tuple[Any, ...]:
        """Runs of blocks and what is known of runs, ghosts, what was learned."""
        return tuple(self.run_of.tolist()), self.runs.state(), self.ghosts.state(), self.table.state()

    def check_invariants(self) -> None:
        """Raises InvariantError if R1, U1 or U2 is broken. O(blocks + runs)."""
        self.runs.check_invariants()
        self.ghosts.check_invariants()
        num_cached = np.bincount(self.run_of[self.run_of > 0], minlength=len(self.runs.num_cached))
        if num_cached.tolist() != self.runs.num_cached:
            raise InvariantError("R1: the cached blocks of a run are counted wrongly")
        if self.ghosts.blocks_by_run() != {run: count for run, count in enumerate(self.runs.num_gone) if count}:
            raise InvariantError("R1: the ghosts of a run are counted wrongly")


def _stretches(values: np.ndarray, ids: np.ndarray) -> Sequence[tuple[int, np.ndarray]]:
    """Each value that n equal neighbours of `values` have, and their n `ids`."""
    as_bytes = values.tobytes()
    if as_bytes[values.itemsize :] == as_bytes[: -values.itemsize]:
        return ((values.item(0), ids),) if ids.size else ()
    cuts = (values[1:] != values[:-1]).nonzero()[0]
    edges = [0, *(cuts + 1).tolist(), ids.size]
    return [(values.item(start), ids[start:end]) for start, end in pairwise(edges)]


__all__ = ["RunKeeper"]
