"""`plan_step` is the sequence of `allocate_slots` calls: same ids, same state, same events, same residency sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, KVCacheMetricsCollector, Request, StepResult
from kvjax.core.manager.step_planner import StepPlanner
from tests.core.manager.manager_lockstep import FULL, HYBRID, SETUPS, WINDOW, Setup

NUM_SEEDS = 16


@dataclass
class Side:
    """One of two managers that lead the same life until the step under test."""

    manager: KVCacheManager
    collector: KVCacheMetricsCollector
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def running(self) -> list[str]:
        return sorted(name for name, request in self.requests.items() if request.row >= 0)


def make_side(setup: Setup, pool_sizes: list[int], events: bool, options: dict[str, Any]) -> Side:
    collector = KVCacheMetricsCollector(sample_rate=0.5, seed=7, clock=lambda: 0)
    manager = setup.manager(pool_sizes, enable_kv_cache_events=events, metrics_collector=collector, **options)
    return Side(manager, collector)


def live_together(rng: np.random.Generator, setup: Setup, sides: list[Side], num_calls: int) -> None:
    """Random admissions, steps, tokens, ends and evictions, the same on every side."""
    hasher = BlockHasher(setup.hash_block_size, "xxhash_cbor", seed="0")
    trunk = rng.integers(0, 2, setup.max_model_len).tolist()
    for i in range(num_calls):
        action = rng.choice(["admit", "admit", "step", "step", "append", "append", "end", "evict"])
        running = sides[0].running
        if action == "admit":
            prompt = trunk[: rng.integers(1, 18)] + rng.integers(0, 2, rng.integers(0, 4)).tolist()
            new, lookahead, delay = (int(x) for x in (rng.integers(1, 12), rng.integers(0, 3), rng.random() < 0.2))
            for side in sides:
                request = Request(f"r{i}", prompt, block_hasher=hasher)
                hit, length = side.manager.get_computed_blocks(request)
                count = setup.cut(length, min(new, len(prompt) - length))
                if side.manager.allocate_slots(request, count, length, hit, lookahead, 0, bool(delay)) is not None:
                    request.num_computed_tokens = length + count
                    side.requests[request.request_id] = request
        elif action == "evict":
            blocks = rng.integers(0, sides[0].manager.block_pool.num_blocks, 3)
            for side in sides:
                side.manager.evict_blocks(blocks)
        elif running:
            name, count = str(rng.choice(running)), int(rng.integers(1, 5))
            tokens = rng.integers(0, 2, count).tolist()
            for side in sides:
                one_call(setup, side, action, name, count, tokens)
        if rng.random() < 0.2:
            for side in sides:
                side.manager.new_step_starts()


def one_call(setup: Setup, side: Side, action: str, name: str, count: int, tokens: list[int]) -> None:
    request = side.requests[name]
    if action == "append":
        request.append_output_token_ids(tokens[: setup.max_model_len - request.num_tokens])
    elif action == "end":
        side.manager.free(side.requests.pop(name))
    else:
        count = min(count, setup.max_model_len - request.num_computed_tokens)
        count = setup.cut(request.num_computed_tokens, count)
        if count and side.manager.allocate_slots(request, count, num_in_flight_tokens=1) is not None:
            request.num_computed_tokens += count


@dataclass(frozen=True)
class Step:
    names: list[str]
    new: list[int]
    lookahead: list[int]
    in_flight: list[int]
    delay: bool


def random_step(rng: np.random.Generator, setup: Setup, side: Side) -> Step:
    names, new, lookahead, in_flight = [], [], [], []
    for name in rng.permutation(side.running).tolist():
        request = side.requests[name]
        room = setup.max_model_len - request.num_computed_tokens
        if room:
            names.append(name)
            new.append(setup.cut(request.num_computed_tokens, min(int(rng.choice([1, 1, 1, 2, 5])), room)))
            lookahead.append(int(rng.choice([0, 0, 0, 1, 3])))
            in_flight.append(int(rng.choice([0, 0, 1, 4])))
    return Step(names, new, lookahead, in_flight, bool(rng.random() < 0.2))


def plan_at_once(side: Side, step: Step) -> tuple[int, list[list[tuple[int, int, int]]]]:
    rows = np.array([side.requests[name].row for name in step.names], np.int64)
    result = side.manager.plan_step(
        rows,
        np.array(step.new, np.int64),
        num_lookahead_tokens=np.array(step.lookahead, np.int64),
        num_in_flight_tokens=np.array(step.in_flight, np.int64),
        delay_cache_blocks=step.delay,
    )
    entries = [
        list(zip(update.rows.tolist(), update.columns.tolist(), update.block_ids.tolist(), strict=True))
        for update in result.new_blocks
    ]
    return result.num_planned, entries


def plan_one_by_one(side: Side, step: Step) -> tuple[int, list[list[tuple[int, int, int]]]]:
    manager = side.manager
    entries: list[list[tuple[int, int, int]]] = [[] for _ in range(manager.num_kv_cache_groups)]
    for i, name in enumerate(step.names):
        request = side.requests[name]
        before = [len(ids) for ids in manager.get_block_ids(name)]
        blocks = manager.allocate_slots(
            request,
            step.new[i],
            num_lookahead_tokens=step.lookahead[i],
            num_in_flight_tokens=step.in_flight[i],
            delay_cache_blocks=step.delay,
        )
        if blocks is None:
            return i, entries
        for group, first, ids in zip(entries, before, blocks.get_block_ids(), strict=True):
            group += [(request.row, first + j, block_id) for j, block_id in enumerate(ids)]
    return len(step.names), entries


def residencies(side: Side) -> Counter[Any]:
    """Ends every request, hands every block out once more, and tells the sampled residencies, of all pools together."""
    for name in side.running:
        side.manager.free(side.requests.pop(name))
    for pool in side.manager.block_pools:
        pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))
    return Counter(side.collector.drain_events())


def check_step(setup: Setup, seed: int, events: bool, **options: Any) -> None:
    rng = np.random.default_rng(seed)
    pool_sizes = [int(rng.integers(3, 45)) for _ in range(setup.num_pools)]
    sides = [make_side(setup, pool_sizes, events, options) for _ in range(2)]
    live_together(rng, setup, sides, num_calls=int(rng.integers(5, 60)))
    bulk, sequence = sides
    assert bulk.manager.snapshot() == sequence.manager.snapshot()
    assert bulk.manager.take_events() == sequence.manager.take_events()
    for _ in range(3):
        step = random_step(rng, setup, bulk)
        assert plan_at_once(bulk, step) == plan_one_by_one(sequence, step)
        assert bulk.manager.snapshot() == sequence.manager.snapshot()
        assert Counter(bulk.manager.take_events()) == Counter(sequence.manager.take_events())
        bulk.manager.check_invariants()
    assert residencies(bulk) == residencies(sequence)


@pytest.mark.parametrize("events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_planned_step_equals_its_calls(setup: Setup, events: bool) -> None:
    for seed in range(NUM_SEEDS // 4 if events else NUM_SEEDS):
        check_step(setup, seed, events)


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_planned_step_equals_its_calls_sweep(setup: Setup) -> None:
    for seed in range(1_000, 21_000):
        check_step(setup, seed, events=seed % 4 == 0)


def test_the_random_steps_take_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[str] = Counter()
    plan_stretch, plan_one, plan = StepPlanner._plan_stretch, StepPlanner._plan_one, StepPlanner.plan

    def stretch(self: StepPlanner, work: Any, updates: Any) -> None:
        taken["stretch of many" if work.rows.size > 1 else "stretch of one"] += 1
        taken["stretch after another"] += any(updates)
        plan_stretch(self, work, updates)

    def one(self: StepPlanner, work: Any, updates: Any) -> bool:
        fits = plan_one(self, work, updates)
        taken["one that fits" if fits else "one that does not"] += 1
        return fits

    def whole(self: StepPlanner, rows: Any, *arguments: Any) -> StepResult:
        result = plan(self, rows, *arguments)
        taken["cut short"] += result.num_planned < len(rows)
        return result

    monkeypatch.setattr(StepPlanner, "_plan_stretch", stretch)
    monkeypatch.setattr(StepPlanner, "_plan_one", one)
    monkeypatch.setattr(StepPlanner, "plan", whole)
    for setup in (WINDOW, HYBRID, SETUPS["window_uncached_first"]):
        for seed in range(NUM_SEEDS):
            check_step(setup, seed, events=False)
    assert set(+taken) == {
        "stretch of many",
        "stretch of one",
        "stretch after another",
        "one that fits",
        "one that does not",
        "cut short",
    }, taken


def decoding_manager(num_requests: int = 3) -> tuple[KVCacheManager, np.ndarray]:
    manager = FULL.manager([20])
    for i in range(num_requests):
        request = Request(f"r{i}", [1, 2, 3])
        assert manager.allocate_slots(request, 3) is not None
        request.num_computed_tokens = 3
    return manager, np.array([manager.request_table.row_of(f"r{i}") for i in range(num_requests)])


def test_one_number_stands_for_every_row() -> None:
    (manager, rows), (other, _) = decoding_manager(), decoding_manager()
    assert manager.plan_step(rows, 2, num_lookahead_tokens=1).num_planned == 3
    assert other.plan_step(rows.tolist(), [2, 2, 2], num_lookahead_tokens=[1, 1, 1]).num_planned == 3
    assert manager.snapshot() == other.snapshot()
    one = np.int64(1)
    assert manager.plan_step(rows, one, num_lookahead_tokens=one, num_in_flight_tokens=np.array(1)).num_planned == 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3], 1), {}, "expected rows that a request owns, got row 3"),
        (([-1], 1), {}, "expected rows that a request owns, got row -1"),
        (([0, -1], 1), {}, "expected rows that a request owns, got row -1"),
        (([10**12], 1), {}, "expected rows that a request owns, got row 1000000000000"),
        (([0, 1, 0], 1), {}, r"expected distinct rows, got \[0, 1, 0\]"),
        (([[0]], 1), {}, r"expected rows as a row of integers, got int64\[1, 1\]"),
        (([0.0], 1), {}, r"expected rows as a row of integers, got float64\[1\]"),
        (([0], 0), {}, "expected num_new_tokens >= 1, got 0"),
        (([0, 1], [1, 0]), {}, "expected num_new_tokens >= 1, got 0"),
        (([0, 1], [1.0, 1.0]), {}, "expected num_new_tokens as integers, got float64"),
        (([0, 1], [1, 1, 1]), {}, r"expected num_new_tokens for 2 rows or one number, got shape \[3\]"),
        (([0], 1), {"num_lookahead_tokens": -1}, "expected num_lookahead_tokens >= 0, got -1"),
        (([0], 1), {"num_in_flight_tokens": [-2]}, "expected num_in_flight_tokens >= 0, got -2"),
        (([0, 1], [1, 22]), {}, "row 1: expected at most max_model_len = 24 tokens, got 25"),
    ],
)
def test_refused_arguments_change_nothing(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    manager, _ = decoding_manager()
    before = manager.snapshot()
    with pytest.raises(ValueError, match=message):
        manager.plan_step(*arguments, **options)
    assert manager.snapshot() == before
