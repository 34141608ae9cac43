"""Running out of blocks at every size: a refused call changes nothing but what left the windows, the second nothing.

One small workload runs in pools of every size from 2 blocks up to where nothing is refused any more. Each refusal is
compared with the naive model, which gives back what left the windows, finds that the rest does not fit, and stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest

from kvjax.core import KVCacheManagerSnapshot
from tests.core.manager.manager_lockstep import HYBRIDS, KINDS, SETUPS, Lockstep, Pair, Setup

CHOSEN = [*KINDS, *HYBRIDS, "full_uncached_first", "window_no_caching", "hybrid_sizes", "full_sink_mla_dcp_pcp"]
PROMPTS = ([0] * 5 + [1] * 6, [0] * 9, [0] * 5 + [1] * 3)  # two share a prefix with the first
NUM_OUTPUTS = 6
MAX_CALLS = 60  # a request that does not fit alone is given up
AMPLE = 70


@dataclass
class Workload:
    """Requests that are admitted, decoded and, where blocks run out, preempted from the last one."""

    both: Lockstep
    plans_steps: bool
    waiting: list[Pair] = field(default_factory=list)
    running: list[Pair] = field(default_factory=list)
    num_refused: int = 0
    may_admit: bool = True  # nobody was refused since the last one left

    def run(self) -> int:
        """How many calls were refused."""
        self.waiting = [self.both.new_pair(f"r{i}", list(prompt), salt="s") for i, prompt in enumerate(PROMPTS)]
        for _ in range(MAX_CALLS):
            if not self.waiting and not self.running:
                break
            self.admit()
            self.plan_step() if self.plans_steps else self.step_one_by_one()
            self.both.manager.new_step_starts()
            self.both.naive.new_step_starts()
        self.both.compare()
        return self.num_refused

    def admit(self) -> None:
        while self.waiting and (self.may_admit or not self.running):
            pair = self.waiting[0]
            before = self.both.manager.snapshot()
            if not self.both.allocate_new(pair, 7, lookahead=1):
                self.check_refusal(before)
                assert not self.both.allocate_new(pair, 7, lookahead=1)
                assert self.both.manager.snapshot() == before
                self.may_admit = False
                if not self.running:
                    self.waiting.pop(0)  # it does not fit alone
                return
            self.running.append(self.waiting.pop(0))

    def next_tokens(self, pair: Pair) -> int:
        if pair.naive.computed == len(pair.naive.tokens):
            self.both.append(pair, [1])
        return min(3, len(pair.naive.tokens) - pair.naive.computed)

    def step_one_by_one(self) -> None:
        for pair in list(self.running):
            while pair in self.running:
                new = self.next_tokens(pair)
                before = self.before()
                if self.both.allocate_running(pair, new, lookahead=1):
                    break
                self.check_refusal(before)
                refused = self.both.manager.snapshot()
                assert not self.both.allocate_running(pair, new, lookahead=1)
                assert self.both.manager.snapshot() == refused
                self.preempt_last()
        self.finish()

    def plan_step(self) -> None:
        rest = list(self.running)
        while rest:
            new = [self.next_tokens(pair) for pair in rest]
            before = self.before()
            planned = self.both.plan_step(rest, new, lookahead=1)
            rest = rest[planned:]
            if rest:
                self.check_refusal(None if planned else before)
                refused = self.both.manager.snapshot()
                assert self.both.plan_step(rest, new[planned:], lookahead=1) == 0
                assert self.both.manager.snapshot() == refused
                self.preempt_last()
                rest = [pair for pair in rest if pair in self.running]
        self.finish()

    def before(self) -> KVCacheManagerSnapshot | None:
        """What a refused step must leave; None: it may give blocks back, as the naive model says."""
        return None if self.both.manager.groups.releasing else self.both.manager.snapshot()

    def check_refusal(self, before: KVCacheManagerSnapshot | None) -> None:
        self.num_refused += 1
        self.both.compare()
        assert before is None or self.both.manager.snapshot() == before

    def preempt_last(self) -> None:
        pair = self.running.pop()
        self.both.preempt(pair)
        if self.running:
            self.waiting.insert(0, pair)

    def finish(self) -> None:
        for pair in [pair for pair in self.running if len(pair.naive.tokens) >= len(PROMPTS[0]) + NUM_OUTPUTS]:
            self.running.remove(pair)
            self.both.free(pair)
            self.may_admit = True


@pytest.mark.parametrize("plans_steps", [False, True], ids=["allocate_slots", "plan_step"])
@pytest.mark.parametrize("setup", [SETUPS[name] for name in CHOSEN], ids=CHOSEN)
def test_a_refused_call_changes_nothing_at_any_pool_size(setup: Setup, plans_steps: bool) -> None:
    """Each pool in turn is the scarce one."""
    for scarce in range(setup.num_pools):
        for size in count(2):
            sizes = [size if pool_id == scarce else AMPLE for pool_id in range(setup.num_pools)]
            if not Workload(Lockstep(setup, sizes), plans_steps).run():
                break
        assert size > 2
