"""Priorities: the more urgent start first and are preempted last; tokens do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.waiting_queue import WaitingQueue
from kvjax.errors import InvariantError
from tests.engine.engines import assert_no_leak, golden_prompts, make_engine
from tests.engine.fake_model import FakeEngine, expected_output


def request_of(arrival: int, priority: int = 0) -> EngineRequest:
    name = f"r{arrival}"
    stats = RequestStats(name, 1, 0.0)
    return EngineRequest(Request(name, [1]), SamplingParams(), 0, frozenset(), arrival, stats, priority=priority)


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_agrees_with_a_sorted_list(seed: int) -> None:
    """The model: a plain list, sorted by priority and arrival. Those that run are a prefix of their priority."""
    rng = np.random.default_rng(seed)
    queue, waiting, running = WaitingQueue(), [], []
    for arrival in range(120):
        choice = rng.integers(4)
        if choice <= 1:
            waiting.append(request_of(arrival, int(rng.integers(-2, 3))))
            queue.add(waiting[-1])
        elif choice == 2 and waiting:
            first = min(waiting, key=lambda one: (one.priority, one.arrival))
            assert queue.first is first
            queue.remove(first)
            waiting.remove(first)
            running.append(first)
        elif running:
            last = max(running, key=lambda one: (one.priority, one.arrival))
            running.remove(last)
            queue.put_back(last)
            waiting.append(last)
        assert list(queue) == sorted(waiting, key=lambda one: (one.priority, one.arrival))
        assert len(queue) == len(waiting)
        queue.check_invariants()


def test_a_queue_out_of_order_is_found() -> None:
    queue = WaitingQueue()
    queue.add(request_of(1))
    queue.add(request_of(0))
    with pytest.raises(InvariantError, match="I1: expected 2 requests of rising urgency"):
        queue.check_invariants()


def test_the_most_urgent_start_first_and_equals_in_order_of_arrival() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", -3), ("d", 1), ("e", 5)):
        engine.add(name, [1, 2], 2, priority=priority)
    engine.run()
    order = sorted(engine.requests.values(), key=lambda one: one.stats.finish_time_s)
    assert [one.request_id for one in order] == ["c", "b", "d", "a", "e"]


def test_the_least_urgent_is_preempted_whenever_it_came() -> None:
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=64)
    engine.add("low", list(range(30)), 40, priority=1)
    engine.step()
    engine.add("high", list(range(100, 130)), 40)
    while not any(one.stats.num_preemptions for one in engine.requests.values()):
        engine.step()
    assert engine.requests["low"].status is RequestStatus.WAITING
    assert engine.requests["high"].stats.num_preemptions == 0
    outputs = engine.run()
    assert outputs == {
        "low": expected_output(list(range(30)), 40),
        "high": expected_output(list(range(100, 130)), 40),
    }


def test_an_urgent_request_overtakes_in_the_engine() -> None:
    engine = make_engine("llama", max_num_seqs=1)
    prompts, params = golden_prompts("llama")[:3], SamplingParams(max_tokens=3, temperature=0.0)
    results = engine.generate(prompts, params, [{"priority": 1}, {"priority": 1}, {"priority": 0}])
    order = sorted(range(3), key=lambda i: results[i].stats.finish_time_s or 0.0)
    assert order == [2, 0, 1]
    assert_no_leak(engine)
    with pytest.raises(
        ValueError, match="expected priority as an integer of 64 bits, lower is more urgent, got 'high'"
    ):
        engine.add_request([1], priority="high")  # type: ignore[arg-type]
