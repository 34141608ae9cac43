"""The learned order from its definition: runs are objects, events are counted one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from tests.core.eviction.naive_policies import NaiveProbationLRU

BINS = 30
NEW = -1.0  # the weight of what was not learned yet
EDGES = [0.0, *(4 * 2 ** (i / 2) for i in range(BINS - 1))]
WIDTHS = [*(b - a for a, b in pairwise(EDGES)), 3 * EDGES[-1]]
MIDDLES = [
    math.sqrt(2.0 * 4.0),
    *(math.sqrt(a * b) for a, b in pairwise(EDGES[1:])),
    1.2 * EDGES[-1],
]


def bin_of(age: int) -> int:
    return max(i for i, edge in enumerate(EDGES) if age >= edge)


def time_in(age: int, which: int) -> float:
    """Requests of the first `age` that lie in a bin."""
    end = EDGES[which + 1] if which + 1 < BINS else math.inf
    return max(min(age, end) - EDGES[which], 0.0)


def class_of(num_hits: int) -> int:
    return [0, 1, 2, 3, 3][num_hits] if num_hits < 5 else 4


@dataclass(eq=False)
class NaiveRun:
    num_hits: int
    cached: list[int] = field(default_factory=list)
    num_gone: int = 0
    since: int = 0
    waits: bool = False
    parent: NaiveRun | None = None
    freed: list[int] = field(default_factory=list)  # last block first


class NaiveLearned(NaiveProbationLRU):
    def __init__(self, num_blocks: int, max_ghosts: int = 20_000, learn_every: int = 200) -> None:
        super().__init__(num_blocks)
        self.max_ghosts, self.learn_every = max_ghosts, learn_every
        self.now = self.learned_at = self.num_taken = 0
        self.run_of: dict[int, NaiveRun] = {}
        self.lists: list[list[NaiveRun]] = [[] for _ in range(6)]  # by class, and those set aside
        self.victims: list[int] = []
        self.pieces: list[tuple[NaiveRun, list[bytes]]] = []  # oldest first
        self.evicted: list[tuple[NaiveRun | None, int, bytes]] = []
        self.uses: list[tuple[int, int, float]] = []  # class, age, weight
        self.ended: list[tuple[int, int, float]] = []
        self.worth = self.make_worth([])

    # What was learned.

    def make_worth(self, waiting: list[tuple[int, int, float]]) -> list[list[float]]:
        uses = [[sum(w for c, a, w in self.uses if (c, bin_of(a)) == (k, b)) for b in range(BINS)] for k in range(5)]
        ended = [*self.ended, *waiting]
        waited = [[sum(w * time_in(a, b) for c, a, w in ended if c == k) for b in range(BINS)] for k in range(5)]
        pooled = [
            (sum(uses[k][b] for k in range(5)) + 4) / (sum(waited[k][b] for k in range(5)) + 4 * MIDDLES[b] / 0.03)
            for b in range(BINS)
        ]
        return [self.worth_by_age(uses[k], waited[k], pooled) for k in range(5)]

    @staticmethod
    def worth_by_age(uses: list[float], waited: list[float], pooled: list[float]) -> list[float]:
        rate = [(uses[b] + 20) / (waited[b] + 20 / pooled[b]) for b in range(BINS)]
        unused, time = [1.0], [0.0]
        for b in range(BINS):
            unused.append(math.exp(-sum(r * w for r, w in zip(rate[: b + 1], WIDTHS, strict=False))))
            time.append(time[-1] + (unused[b] - unused[b + 1]) / rate[b])
        stretches = [
            [(unused[a] - unused[b]) / (time[b] - time[a]) for b in range(a + 1, BINS + 1) if time[b] - time[a] > 1e-12]
            for a in range(BINS)
        ]
        return [float(np.float32(max(values, default=0.0))) for values in stretches]

    def learn(self) -> None:
        fade = 0.5 ** ((self.now - self.learned_at) / 20_000)
        self.learned_at = self.now
        for events in (self.uses, self.ended):
            events[:] = [(c, a, 1.0 if w == NEW else w * fade) for c, a, w in events]
        runs = {id(run): run for run in [*self.run_of.values(), *(run for run, _ in self.pieces)]}.values()
        self.worth = self.make_worth([(class_of(r.num_hits), self.now - r.since, 1.0) for r in runs if r.waits])

    def note(self, run: NaiveRun, was_used: bool) -> None:
        event = (class_of(run.num_hits), self.now - run.since, NEW)
        if was_used:
            self.uses.append(event)
        self.ended.append(event)

    # Runs.

    def admitted(self) -> None:
        self.now += 1

    def leave(self, run: NaiveRun) -> None:
        for each in self.lists:
            if run in each:
                each.remove(run)

    def is_listed(self, run: NaiveRun) -> bool:
        return any(run in each for each in self.lists)

    def children(self, run: NaiveRun) -> bool:
        evicted = [other for other, _, _ in self.evicted if other is not None]  # gone when the step is planned
        return any(other.parent is run for other in [*self.run_of.values(), *evicted])

    def stand_on(self, run: NaiveRun, parent: NaiveRun | None) -> None:
        old, run.parent = run.parent, parent
        if old is not None and old in self.lists[5] and not self.children(old):
            self.leave(old)
            self.lists[class_of(old.num_hits)].insert(0, old)

    def shrink(self, run: NaiveRun, blocks: Sequence[int] = (), num_gone: int = 0) -> None:
        run.cached = [block for block in run.cached if block not in blocks]
        run.num_gone -= num_gone
        if not run.cached:
            self.leave(run)
            self.stand_on(run, None)
            if not run.num_gone:
                for other in {id(r): r for r in self.run_of.values()}.values():
                    if other.parent is run:
                        other.parent = None

    def make(self, num_hits: int, blocks: list[int]) -> NaiveRun:
        made = NaiveRun(num_hits, list(blocks))
        for block in blocks:
            self.run_of[block] = made
        return made

    def stretches(self, blocks: list[int]) -> list[tuple[NaiveRun | None, list[int]]]:
        runs = [(self.run_of.get(block), block) for block in blocks]
        return [
            (pairs[0][0], [b for _, b in pairs]) for _, g in groupby(runs, lambda p: id(p[0])) if (pairs := list(g))
        ]

    def use(self, blocks: list[int]) -> None:
        for run, part in self.stretches(blocks):
            if run is not None and run.waits:
                self.note(run, was_used=True)
            if run is not None and len(part) == len(run.cached) + run.num_gone:
                run.num_hits, run.waits = run.num_hits + 1, False
                self.leave(run)
                continue
            made = self.make(run.num_hits + 1 if run is not None else 1, part)
            if run is not None:
                made.parent, run.parent = run.parent, None
                if self.is_listed(run):
                    run.parent = made
                self.shrink(run, part)

    def append(self, blocks: list[int]) -> None:
        self.lasting += blocks
        child = None
        for run, part in self.stretches(blocks):
            for made, of_run in [(run, part)] if run is not None else self.make_released(part):
                made.freed = (made.freed if self.is_listed(made) else []) + of_run
                self.leave(made)
                made.since, made.waits = self.now, True
                self.lists[class_of(made.num_hits)].append(made)
                if child not in (None, made):
                    self.stand_on(child, made)
                child = made

    def make_released(self, blocks: list[int]) -> list[tuple[NaiveRun, list[int]]]:
        found, rest = [], blocks[::-1]
        while rest:
            hashes = [self.hash_of[block] for block in rest]
            piece = next((piece for piece in self.pieces if piece[1][0] == hashes[0]), None)
            count, num_hits = len(rest), 0
            if piece is not None:
                run, remembered = piece
                count = next(
                    (i for i, pair in enumerate(zip(remembered, hashes, strict=False)) if pair[0] != pair[1]), 0
                )
                count = count or min(len(remembered), len(hashes))
                num_hits = run.num_hits + 1
                self.note(run, was_used=True)
                self.pieces.remove(piece)
                if count < len(remembered):
                    self.remember(run, remembered[count:])
                self.shrink(run, num_gone=len(remembered))
            found.append((self.make(num_hits, rest[:count]), rest[:count][::-1]))
            rest = rest[count:]
        return found[::-1]

    def remember(self, run: NaiveRun, hashes: list[bytes]) -> None:
        run.num_gone += len(hashes)
        same = [piece for piece in self.pieces if piece[1][0] == hashes[0]]
        self.pieces = [*(piece for piece in self.pieces if piece not in same), (run, hashes)]
        while sum(len(piece[1]) for piece in self.pieces) > self.max_ghosts:
            same.append(self.pieces.pop(0))
        for lost, gone in same:
            if not lost.cached and lost.num_gone == len(gone):
                self.note(lost, was_used=False)
            self.shrink(lost, num_gone=len(gone))

    # What goes next.

    def name_victims(self, num_wanted: int) -> None:
        while len(self.victims) < num_wanted and any(self.lists):
            firsts = [runs[0] for runs in self.lists[:5] if runs]
            run = min(firsts, key=self.value_of, default=self.lists[5][0] if self.lists[5] else None)
            assert run is not None
            if firsts and self.children(run):
                self.leave(run)
                self.lists[5].append(run)
                continue
            self.leave(run)
            self.stand_on(run, None)
            self.victims += [b for b in run.freed if self.run_of.get(b) is run and b in self.lasting]

    def value_of(self, run: NaiveRun) -> tuple[float, int, int]:
        of_class = class_of(run.num_hits)
        return self.worth[of_class][bin_of(self.now - run.since)], run.since, of_class

    def order(self) -> list[int]:
        return copy.deepcopy(self).take(self.num_free)

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.probation) + len(self.lasting)

    def take_one(self) -> int:
        old = [block for block in self.blank + self.probation if block not in self.young]
        if old or not self.lasting:
            block = (old or self.blank or self.probation)[0]
            if not old:
                self.young.clear()
            self.remove(block)
        else:
            self.name_victims(1)
            block = self.victims.pop(0)
            self.lasting.remove(block)
            self.num_taken += 1
        self.on_probation.discard(block)
        if block in self.hashed:
            self.evicted.append((self.run_of.pop(block, None), block, self.hash_of[block]))
        return block

    def step_planned(self) -> None:
        for run, group in groupby(self.evicted, lambda entry: entry[0]):
            _, blocks, hashes = zip(*group, strict=True)
            if run is not None:
                self.remember(run, list(hashes[::-1]))
                self.shrink(run, blocks)
        self.evicted = []
        if self.now - self.learned_at >= self.learn_every:
            self.learn()
        wanted, self.num_taken = min(self.num_taken, len(self.lasting) // 32), 0
        self.name_victims(wanted)
        self.young.clear()

    def release(self, blocks: list[int]) -> None:
        """What is lasting comes in as one release."""
        lasting = [block for block in blocks if self.queue_of(block) is self.lasting]
        super().release([block for block in blocks if block not in lasting])
        self.append(lasting)

    def remove(self, block: int) -> None:
        super().remove(block)
        if block in self.victims:
            self.victims.remove(block)

    def hits(self, blocks: list[int]) -> None:
        super().hits(blocks)
        self.use([block for block in blocks if block in self.hashed])

    def kept(self, blocks: list[int]) -> None:
        self.on_probation.difference_update(blocks)
        free = [block for block in blocks if block in self.probation]
        if free or any(block in self.lasting for block in blocks):
            self.young.clear()
        self.probation = [block for block in self.probation if block not in free]
        self.append(free)

    def all_forgotten(self, blocks: list[int]) -> None:
        super().all_forgotten(blocks)
        for block in blocks:
            if (run := self.run_of.pop(block, None)) is not None:
                self.shrink(run, [block])
