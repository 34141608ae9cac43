"""Random calls on a `Lockstep`, drawn from a numpy generator: what a test adds, it adds to `actions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.core.manager.manager_lockstep import Lockstep, Pair, Setup

MAX_WAITING = 4


class RandomLockstep:
    """One deployment in both worlds. Prompts are prefixes of one trunk and a few tokens of their own."""

    def __init__(self, setup: Setup, seed: Any, max_blocks: int = 30, **options: Any) -> None:
        self.rng = np.random.default_rng(seed)
        sizes = self.rng.integers(4, max_blocks, setup.num_pools).tolist()
        self.both = Lockstep(setup, sizes)
        if options:
            self.both.manager = setup.manager(sizes, **options)
        self.trunk = self.rng.integers(0, 2, setup.max_model_len).tolist()
        self.waiting: list[Pair] = []
        self.num_requests = 0
        self.compares = True  # after every call
        self.actions: list[Callable[[], object]] = [
            *[self.admit] * 5,
            *[self.step] * 5,
            *[self.step_one] * 3,
            *[self.append] * 4,
            *[self.leave] * 2,
            self.dispatch,
            self.evict,
            self.new_step,
            self.reset,
        ]

    def call(self) -> None:
        """One of the actions, and a comparison of all state."""
        self.actions[self.some(0, len(self.actions) - 1)]()
        if self.compares:
            self.both.compare()

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def one_of(self, values: Any) -> Any:
        return values[self.some(0, len(values) - 1)]

    def request_options(self) -> dict[str, Any]:
        return {"salt": self.one_of([None, None, "salt"])}

    def new_pair(self) -> Pair:
        self.num_requests += 1
        longest = self.both.setup.max_model_len - 4
        tokens = self.trunk[: self.some(0, longest - 3)] + self.rng.integers(0, 2, self.some(1, 3)).tolist()
        return self.both.new_pair(f"r{self.num_requests}", tokens, **self.request_options())

    def running(self) -> Pair | None:
        return self.both.pairs[self.one_of(sorted(self.both.pairs))] if self.both.pairs else None

    def left(self, pair: Pair) -> int:
        return len(pair.naive.tokens) - pair.naive.computed

    def admit(self) -> None:
        pair = self.waiting.pop(0) if self.waiting else self.new_pair()
        new = self.some(1, len(pair.naive.tokens))
        if not self.both.allocate_new(pair, new, use_hit=self.some(0, 4) > 0, must_fit=self.some(0, 1) > 0):
            self.waiting.append(pair)
            del self.waiting[MAX_WAITING:]

    def step(self) -> None:
        pairs = [pair for pair in self.both.pairs.values() if self.left(pair) > 0]
        if pairs:
            self.both.plan_step(pairs, [self.some(1, self.left(pair)) for pair in pairs])

    def step_one(self) -> None:
        pair = self.running()
        if pair is not None and self.left(pair) > 0:
            self.both.allocate_running(pair, self.some(1, self.left(pair)))

    def append(self) -> None:
        pair = self.running()
        if pair is not None:
            room = self.both.setup.max_model_len - len(pair.naive.tokens)
            self.both.append(pair, self.rng.integers(0, 2, min(self.some(1, 3), room)).tolist())

    def leave(self) -> None:
        pair = self.running()
        if pair is None:
            return
        if self.some(0, 1):
            self.both.preempt(pair)
            self.waiting.append(pair)
        else:
            self.both.free(pair)

    def dispatch(self) -> None:
        pair = self.running()
        if pair is not None:
            pair.unsettled = min(self.some(0, 2), pair.naive.computed)

    def evict(self) -> None:
        pool_id = self.some(0, self.both.setup.num_pools - 1)
        blocks = {self.some(0, self.both.pool_sizes[pool_id] - 1) for _ in range(2)}
        self.both.manager.evict_blocks(blocks, pool_id)
        self.both.naive.evict(pool_id, sorted(blocks))

    def new_step(self) -> None:
        self.both.manager.new_step_starts()
        self.both.naive.new_step_starts()

    def reset(self) -> None:
        assert self.both.manager.reset_prefix_cache() == self.both.naive.reset()
