"""Requests that load beside those that run: whoever is least urgent gives its blocks up, whatever it is at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvjax.core import KVCacheManager
from kvjax.engine.drafts.prompt_lookup import PromptLookup
from kvjax.engine.requests.engine_request import RequestStatus
from kvjax.engine.requests.request_inputs import RequestInputs
from kvjax.engine.scheduling.speculation import SpeculativeConfig
from kvjax.errors import InvariantError
from tests.engine.fake_model import FakeEngine, expected_output, expected_output_with_states
from tests.engine.fake_tiers import FakeTiers

HAS_BLOCKS = (RequestStatus.RUNNING, RequestStatus.LOADING)
MOST_STEPS = 12  # of a load
MOST_STEPS_BETWEEN = 8  # two requests of a workload


def make_drafter(manager: KVCacheManager) -> PromptLookup:
    return PromptLookup(manager.request_table, SpeculativeConfig(num_drafts=3), 128)


def make_engine(
    seed: int = 0, num_blocks: int = 40, failure_rate: float = 0.0, most_steps: int = MOST_STEPS, **options: Any
) -> FakeEngine:
    """With a host tier whose loads take up to `most_steps` steps."""
    return FakeEngine(
        num_blocks, make_tiers=lambda config: FakeTiers(config, seed, most_steps, failure_rate), **options
    )


def assert_nothing_leaks(engine: FakeEngine) -> FakeTiers:
    """Once loads that were cancelled are over no block, slot or row is held, and no request is known."""
    assert engine.tiers is not None
    for _ in range(MOST_STEPS + 2):
        engine.step()
    assert engine.manager.usage == 0
    assert len(engine.manager.request_table) == 0
    assert engine.scheduler.num_unfinished == engine.scheduler.num_loading == 0
    assert engine.tiers.scheduler.num_loads == engine.tiers.host.num_held == 0
    return engine.tiers


def step_until(engine: FakeEngine, is_so: Callable[[], bool]) -> None:
    for _ in range(300):
        if is_so():
            return
        engine.step()
    pytest.fail("it never came to be")


def put_on_the_host(engine: FakeEngine, prompt: list[int]) -> None:
    """A request computes the prompt, others evict it."""
    engine.add("first", prompt, 1)
    engine.run()
    engine.add("other", list(range(500, 600)), 8)
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priority", [0, 2])
def test_a_request_that_loads_gives_way_to_a_more_urgent_one_that_runs(depth: int, priority: int) -> None:
    """Of one priority the later one is less urgent. Its load is cancelled, and it is loaded once more."""
    engine, prompt = make_engine(depth=depth), list(range(60))
    put_on_the_host(engine, prompt)
    urgent, late = list(range(200, 230)), [*prompt, 1]
    engine.add("urgent", urgent, 78)
    step_until(engine, lambda: engine.requests["urgent"].request.num_output_tokens == 1)
    assert engine.tiers is not None
    engine.tiers.hold = True
    engine.add("late", late, 5, priority=priority)
    step_until(engine, lambda: engine.requests["late"].stats.num_preemptions > 0)
    assert engine.requests["late"].status is RequestStatus.WAITING
    step_until(engine, lambda: engine.requests["urgent"].status is RequestStatus.FINISHED)
    assert engine.requests["urgent"].stats.num_preemptions == 0
    assert engine.requests["late"].request.num_output_tokens == 0
    engine.tiers.hold = False
    outputs = engine.run()
    assert outputs["urgent"] == expected_output(urgent, 78)
    assert outputs["late"] == expected_output(late, 5)
    assert engine.requests["late"].stats.num_cached_tokens == 60
    assert_nothing_leaks(engine)


def test_a_request_that_runs_alone_is_not_preempted_while_another_loads() -> None:
    engine, prompt = make_engine(num_blocks=42), list(range(60))
    put_on_the_host(engine, prompt)
    assert engine.tiers is not None
    engine.tiers.hold = True
    engine.add("late", [*prompt, 1], 5, priority=1)
    engine.step()
    engine.add("urgent", [7], 120)
    step_until(engine, lambda: engine.requests["urgent"].status is RequestStatus.FINISHED)
    assert engine.requests["urgent"].stats.num_preemptions == 0
    engine.tiers.hold = False
    assert engine.run()["late"] == expected_output([*prompt, 1], 5)


def test_a_request_that_was_loaded_runs_at_once_whoever_else_has_vectors() -> None:
    """Its places in the buffer of vectors are its own while it loads: a later one waits for its turn."""
    limits = {"num_blocks": 60, "max_num_batched_tokens": 8, "num_embedding_rows": 4}
    engine, prompt = make_engine(most_steps=0, **limits), list(range(60))
    put_on_the_host(engine, prompt)
    assert engine.tiers is not None
    engine.tiers.hold = True
    vectors = RequestInputs(embeds=np.zeros((3, 2), np.float32), places=np.array([60, 61, 62]))
    engine.add("loaded", [*prompt, 1, 2, 3], 8, inputs=vectors)
    engine.step()
    engine.add("later", list(range(300, 363)), 4, inputs=vectors)
    for _ in range(3):
        engine.step()
    engine.tiers.hold = False
    for _ in range(2):
        engine.step()
    assert engine.requests["loaded"].status is RequestStatus.RUNNING
    assert "loaded" in engine.steps[-1].request_ids
    engine.run()
    assert_nothing_leaks(engine)


def test_a_request_that_waits_behind_less_urgent_ones_is_found_out() -> None:
    engine = make_engine()
    engine.add("a", [1], 9)
    engine.step()
    engine.requests["a"].priority = 1
    engine.add("b", [2], 9, priority=1)
    engine.requests["b"].arrival = -1
    with pytest.raises(InvariantError, match="I1: b waits, and requests of less urgency have blocks"):
        engine.scheduler.check_invariants()


# -- random workloads -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """What a seed stands for."""

    engine: FakeEngine
    requests: list[tuple[str, list[int], int, int, int]]  # id, prompt, new tokens, samples, priority
    rng: np.random.Generator
    expected: dict[str, list[int]]

    @classmethod
    def of(cls, seed: int, num_requests: int) -> Workload:
        rng = np.random.default_rng(seed)
        num_states = int(rng.choice([0, 0, 40]))
        options: dict[str, Any] = {"depth": int(rng.integers(1, 3)), "num_states": num_states}
        if seed % 4 == 3:
            options |= {"make_drafter": make_drafter, "num_drafts": 3}
        failure_rate = float(rng.choice([0.0, 0.0, 0.05]))
        engine = make_engine(seed, failure_rate=failure_rate, zero_new_pages=bool(rng.integers(2)), **options)
        stems = [rng.integers(0, 9, 40).tolist() for _ in range(4)]
        num_priorities = 1 + seed % 3
        requests, expected = [], {}
        oracle = expected_output_with_states if num_states else expected_output
        for i in range(num_requests):
            own = rng.integers(0, 9, int(rng.integers(1, 6))).tolist()
            prompt = stems[rng.integers(4)][: int(rng.integers(8, 41))] + own
            count, n = int(rng.integers(1, 40)), int(rng.integers(1, 4)) if rng.random() < 0.2 else 1
            requests.append((f"r{i}", prompt, count, n, int(rng.integers(num_priorities))))
            for name in [f"r{i}", *(f"r{i}.{k}" for k in range(1, n))]:
                expected[name] = oracle(prompt, count)
        return cls(engine, requests, rng, expected)

    def run(self) -> Iterator[None]:
        """Requests come while others run and load, and some are aborted; once after each step."""
        engine = self.engine
        for name, prompt, count, n, priority in self.requests:
            engine.add(name, prompt, count, n=n, priority=priority)
            for _ in range(self.rng.integers(0, MOST_STEPS_BETWEEN)):
                engine.step()
                yield
            unfinished = list(engine.loop.requests)
            if unfinished and self.rng.random() < 0.1:
                aborted = unfinished[self.rng.integers(len(unfinished))]
                engine.loop.abort(aborted)
                self.expected[aborted] = self.expected[aborted][: len(engine.outputs[aborted])]
        while engine.scheduler.num_unfinished:
            engine.step()
            yield


def assert_the_least_urgent_give_way(seed: int, num_requests: int) -> FakeTiers:
    """Three laws.

    Whoever has blocks is more urgent than all that were preempted and wait; of one whose load failed that is told in
    the step that preempts it. The tokens are the model's own, as of an engine with room for everybody. Nobody starves:
    the most urgent that has blocks gets a token in each step, or loads. It keeps what it has until it ends, or until a
    more urgent one is admitted, which then ends.
    """
    work = Workload.of(seed, num_requests)
    engine, before, num_steps = work.engine, dict[str, int](), 0
    for _ in work.run():
        kept = [one.urgency for one in engine.requests.values() if one.status in HAS_BLOCKS]
        for one in engine.requests.values():
            gave_way = one.stats.num_preemptions > (before.get(one.request_id, 0) if one.has_failed_load else 0)
            if one.status is RequestStatus.WAITING and gave_way:
                assert all(urgency < one.urgency for urgency in kept)
        before = {name: one.stats.num_preemptions for name, one in engine.requests.items()}
        num_steps += 1
    assert engine.run() == work.expected
    most_steps = [one.max_total_tokens + MOST_STEPS + 8 for one in engine.requests.values()]
    assert num_steps <= MOST_STEPS_BETWEEN * num_requests + sum(most_steps) + len(most_steps) * max(most_steps)
    return assert_nothing_leaks(engine)


@pytest.mark.parametrize("first_seed", range(0, 20, 4))
def test_the_least_urgent_give_way(first_seed: int) -> None:
    tiers = [assert_the_least_urgent_give_way(seed, 12) for seed in range(first_seed, first_seed + 4)]
    assert sum(one.num_cancelled for one in tiers) > 0
    assert sum(one.scheduler.stats.num_loaded_tokens for one in tiers) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 200))
def test_the_least_urgent_give_way_in_long_runs(seed: int) -> None:
    assert assert_the_least_urgent_give_way(seed, 60).num_cancelled > 0
