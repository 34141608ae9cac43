"""What keeping a run of blocks is worth, by its class and age: learned from uses, and from waiting in vain.

Flow:    RunKeeper -> [LearnedTable.note_use, note_loss, rebuild] -> worth_of(class, age) -> which run is evicted next
Source:  hazard rates and the stopping index of Gittins (1979), with counts shrunk towards those of all classes

A class says how often a run was hit (`class_of`), its age is the requests since it became free. Ages fall into bins
that grow by the root of 2 from 4 requests. Counted per class and bin are

    uses     runs that were hit again at that age
    waited   requests that runs spent there: those hit again, those forgotten and those that still wait

and made of them now and then

    rate  = (uses + K) / (waited + K / pooled)     what has few uses is taken to be as all classes together
    worth = the most, over every later edge b, of P(hit between the age and b) / E[requests until hit or b]

So `worth` is the hits a request that keeping brings in its best stretch. The pooled rate tends to `PRIOR / age` in the
same way, which falls with age: where little is known, the oldest goes first, as under LRU. Counts halve every
`HALF_LIFE` requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASS_NAMES = ("never hit", "hit once", "hit twice", "hit 3 or 4 times", "hit more often")
NUM_CLASSES = len(CLASS_NAMES)
NUM_BINS = 30
FIRST_EDGE = 4.0
HALF_LIFE = 20_000
K = 20.0
PRIOR = 0.03
EDGES = np.concatenate(([0.0], FIRST_EDGE * 2 ** (np.arange(NUM_BINS - 1) / 2)))
WIDTHS = np.append(np.diff(EDGES), 3 * EDGES[-1])  # the last bin is open; it must have some width
MIDDLES = np.append(np.sqrt(np.maximum(EDGES[:-1], FIRST_EDGE / 2) * EDGES[1:]), 1.2 * EDGES[-1])
MAX_AGE = int(EDGES[-1])  # older runs are in the same bin
BIN_OF_AGE = np.searchsorted(EDGES, np.arange(MAX_AGE + 1), side="right") - 1
BINS = tuple(BIN_OF_AGE.tolist())
IS_LATER = np.triu(np.ones((NUM_BINS, NUM_BINS), np.bool_))
NO_RUNS = np.zeros(0, np.int64)


def class_of(num_hits: int) -> int:
    """The class of a run that was hit so often."""
    return num_hits if num_hits < 3 else 3 if num_hits < 5 else 4


def bin_of(age: int) -> int:
    """The bin of an age, -1 for the last one."""
    return BINS[age] if age < MAX_AGE else -1


@dataclass(frozen=True)
class LearnedClass:
    """What is known of one class."""

    name: str
    uses: float  # hits counted, faded
    waited_requests: float  # faded, without the runs that still wait
    worth_by_age: tuple[tuple[int, float], ...]  # requests, hits a request

    def describe(self) -> str:
        """One line for a person."""
        worth = ", ".join(f"{1_000 * worth:.3g} after {age:,}" for age, worth in self.worth_by_age)
        return f"{self.name:16}  {self.uses:,.0f} times hit again; keeping brings in 1,000 requests {worth} hits"


class LearnedTable:
    """Counts by class and bin, and the worth that was made of them last."""

    def __init__(self) -> None:
        self._uses = np.zeros((NUM_CLASSES, NUM_BINS))
        self._waited = np.zeros((NUM_CLASSES, NUM_BINS))
        self._used: list[int] = []  # class, age, class, age, ...: not counted yet
        self._lost: list[int] = []
        self.rebuilt_at = 0  # clock
        self.worth: list[list[float]] = []  # [classes][bins]
        self.classes: tuple[LearnedClass, ...] = ()  # what is known of each
        self.rebuild(0, NO_RUNS, NO_RUNS)

    def note_use(self, of_class: int, age: int) -> None:
        """A run was hit that waited so long."""
        self._used += (of_class, age)

    def note_loss(self, of_class: int, age: int) -> None:
        """A run was forgotten that waited so long."""
        self._lost += (of_class, age)

    def worth_of(self, of_class: int, age: int) -> float:
        """Hits a request."""
        return self.worth[of_class][bin_of(age)]

    def rebuild(self, now: int, classes: np.ndarray, ages: np.ndarray) -> None:
        """Makes `worth` anew, when int64[n] classes and ages are those of the runs that wait. About 300 us."""
        fade = 0.5 ** ((now - self.rebuilt_at) / HALF_LIFE)
        used = np.array(self._used, np.int64).reshape(-1, 2)
        ended = np.concatenate((used, np.array(self._lost, np.int64).reshape(-1, 2)))
        self._uses = self._uses * fade + _counts(used[:, 0] * NUM_BINS + _bins(used[:, 1]))
        self._waited = self._waited * fade + _time_spent(ended[:, 0], ended[:, 1])
        self._used, self._lost, self.rebuilt_at = [], [], now
        self.worth = make_worth(self._uses, self._waited + _time_spent(classes, ages)).tolist()
        self.classes = self._make_classes()

    def state(self) -> tuple[Any, ...]:
        """Counts and worth."""
        counted = tuple(self._uses.ravel().tolist()), tuple(self._waited.ravel().tolist())
        return (*counted, tuple(self._used), tuple(self._lost), self.rebuilt_at, tuple(map(tuple, self.worth)))

    def _make_classes(self) -> tuple[LearnedClass, ...]:
        ages = (16, 256, 4_096)
        return tuple(
            LearnedClass(
                name,
                float(self._uses[i].sum()),
                float(self._waited[i].sum()),
                tuple((age, self.worth_of(i, age)) for age in ages),
            )
            for i, name in enumerate(CLASS_NAMES)
        )


def make_worth(uses: np.ndarray, waited: np.ndarray) -> np.ndarray:  # float32[classes, bins]
    """The worth, from float64[classes, bins] uses and requests waited; rounded, so that equal prospects are equal."""
    pooled = (uses.sum(0) + K / 5) / (waited.sum(0) + K / 5 * MIDDLES / PRIOR)
    rate = (uses + K) / (waited + K / pooled)
    zero = np.zeros((len(rate), 1))
    unused = np.exp(-np.concatenate((zero, (rate * WIDTHS).cumsum(1)), 1))  # at the edges
    time = np.concatenate((zero, ((unused[:, :-1] - unused[:, 1:]) / rate).cumsum(1)), 1)
    gain = unused[:, :-1, None] - unused[:, None, 1:]
    cost = time[:, None, 1:] - time[:, :-1, None]
    known = IS_LATER & (cost > 1e-12)
    return np.where(known, gain / np.where(known, cost, 1), 0).max(2).astype(np.float32)


def _bins(ages: np.ndarray) -> np.ndarray:  # int64[n]
    return BIN_OF_AGE[np.minimum(ages, MAX_AGE)]


def _counts(places: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:  # [classes, bins]
    return np.bincount(places, weights, NUM_CLASSES * NUM_BINS).reshape(NUM_CLASSES, NUM_BINS)


def _time_spent(classes: np.ndarray, ages: np.ndarray) -> np.ndarray:  # float64[classes, bins]
    """Requests that runs which waited so long spent in each bin."""
    bins = _bins(ages)
    places = classes * NUM_BINS + bins
    counts = _counts(places)
    num_older = counts[:, ::-1].cumsum(1)[:, ::-1] - counts
    return num_older * WIDTHS + _counts(places, ages - EDGES[bins])


__all__ = ["CLASS_NAMES", "NUM_CLASSES", "LearnedClass", "LearnedTable", "bin_of", "class_of", "make_worth"]
