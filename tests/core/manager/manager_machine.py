"""The state machine of random lives: a manager and the naive model in lockstep, compared after every step."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.manager.manager_lockstep import Lockstep, Pair, Setup

TOKEN = st.integers(0, 1)
COUNT = st.integers(0, 6)


class ManagerMachine(RuleBasedStateMachine):
    setup: Setup
    num_steps: int  # of all lives

    @initialize(
        sizes=st.lists(st.integers(2, 30), min_size=4, max_size=4), trunk=st.lists(TOKEN, min_size=24, max_size=24)
    )
    def start(self, sizes: list[int], trunk: list[int]) -> None:
        self.both = Lockstep(self.setup, sizes[: self.setup.num_pools])
        self.trunk = (trunk * 3)[: self.setup.max_model_len]  # most prompts are prefixes of it, and share blocks
        self.waiting: list[Pair] = []
        self.num_requests = 0

    def running(self, data: st.DataObject) -> Pair:
        return self.both.pairs[data.draw(st.sampled_from(sorted(self.both.pairs)))]

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(TOKEN, max_size=4),
        salt=st.sampled_from([None, None, None, "salt"]),
        new=st.integers(1, 20),
        lookahead=st.integers(0, 3),
        external=st.sampled_from([0, 0, 0, 3, 7]),
        delay=st.booleans(),
        must_fit=st.booleans(),
        use_hit=st.booleans(),
    )
    def admit(self, shared, own, salt, new, lookahead, external, delay, must_fit, use_hit) -> None:
        if self.waiting:
            pair = self.waiting.pop()
        else:
            self.num_requests += 1
            tokens = (self.trunk[: shared * self.setup.max_model_len // 24] + own) or [0]
            pair = self.both.new_pair(f"r{self.num_requests}", tokens, salt)
        options = {"lookahead": lookahead, "external": external, "delay": delay, "must_fit": must_fit}
        before = self.both.manager.snapshot()
        if not self.both.allocate_new(pair, new, use_hit=use_hit, **options):
            assert self.both.manager.snapshot() == before
            self.waiting.append(pair)

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data(), new=COUNT, lookahead=st.integers(0, 3), delay=st.booleans(), must_fit=st.booleans())
    def step_one(self, data, new, lookahead, delay, must_fit) -> None:
        pair = self.running(data)
        new = self.next_tokens(pair, new)
        if new:
            options = {"lookahead": lookahead, "delay": delay, "must_fit": must_fit}
            if not self.both.allocate_running(pair, new, **options):
                refused = self.both.manager.snapshot()
                assert not self.both.allocate_running(pair, new, **options)
                assert self.both.manager.snapshot() == refused

    @precondition(lambda self: self.both.pairs)
    @rule(
        data=st.data(),
        counts=st.lists(COUNT, min_size=12, max_size=12),
        lookahead=st.integers(0, 2),
        delay=st.booleans(),
    )
    def step_many(self, data, counts, lookahead, delay) -> None:
        names = data.draw(st.permutations(sorted(self.both.pairs)))
        pairs = [self.both.pairs[name] for name in names[: len(counts)]]
        new = [self.next_tokens(pair, count) for pair, count in zip(pairs, counts, strict=False)]
        chosen = [(pair, count) for pair, count in zip(pairs, new, strict=True) if count]
        if chosen:
            self.both.plan_step([pair for pair, _ in chosen], [count for _, count in chosen], lookahead, delay)

    def next_tokens(self, pair: Pair, wanted: int) -> int:
        """At most what the request has left to compute, with up to two drafted tokens; 0 if it is at its end."""
        left = len(pair.naive.tokens) - pair.naive.computed
        room = self.setup.max_model_len - pair.naive.computed
        return min(max(wanted, 1), max(left, 0) + 2, room)

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=4))
    def append(self, data, tokens) -> None:
        pair = self.running(data)
        self.both.append(pair, tokens[: self.setup.max_model_len - len(pair.naive.tokens)])

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data(), count=st.integers(0, 4))
    def dispatch(self, data, count) -> None:
        pair = self.running(data)
        pair.unsettled = min(count, pair.naive.computed)

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data())
    def reject_drafts(self, data) -> None:
        pair = self.running(data)
        self.both.take_back(pair, pair.unsettled)
        pair.unsettled = 0

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data(), preempt=st.booleans())
    def leave(self, data, preempt) -> None:
        pair = self.running(data)
        if preempt:
            self.both.preempt(pair)
            self.waiting.append(pair)
        else:
            self.both.free(pair)

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data())
    def cache_delayed(self, data) -> None:
        pair = self.running(data)
        self.both.manager.cache_blocks(pair.request, pair.naive.computed)
        self.both.naive.register(pair.naive, pair.naive.computed)

    @precondition(lambda self: self.both.pairs)
    @rule(data=st.data())
    def release_early(self, data) -> None:
        pair = self.running(data)
        settled = pair.naive.computed - pair.unsettled
        self.both.manager.remove_skipped_blocks(pair.name, settled)
        self.both.naive.release_skipped(pair.name, settled)

    @rule(data=st.data())
    def evict(self, data) -> None:
        pool_id = data.draw(st.integers(0, self.setup.num_pools - 1))
        blocks = data.draw(st.sets(st.integers(0, self.both.pool_sizes[pool_id] - 1), max_size=3))
        self.both.manager.evict_blocks(blocks, pool_id)
        self.both.naive.evict(pool_id, sorted(blocks))

    @rule()
    def reset(self) -> None:
        assert self.both.manager.reset_prefix_cache() == self.both.naive.reset()

    @rule()
    def new_step(self) -> None:
        self.both.manager.new_step_starts()
        self.both.naive.new_step_starts()

    @invariant()
    def same_state(self) -> None:
        """`check_invariants` and a comparison of all state."""
        if hasattr(self, "both"):
            self.both.compare()
            type(self).num_steps += 1


def run_machine(setup: Setup, run_settings: settings, run_seed: int | None = None) -> int:
    """Leads random lives in one deployment; the number of steps, each of them checked.

    With a seed the lives are the same every time.
    """

    class Machine(ManagerMachine):
        pass

    Machine.setup = setup
    Machine.num_steps = 0
    seeded = Machine if run_seed is None else seed(run_seed)(Machine)
    run_state_machine_as_test(seeded, settings=settings(run_settings, suppress_health_check=list(HealthCheck)))
    return Machine.num_steps
