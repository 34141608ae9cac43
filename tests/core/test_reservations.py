"""With `reserve=True` whoever is admitted finishes: no later call is refused, whatever the others do."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.errors import InvariantError
from tests.core.manager_lockstep import FULL, HYBRID, SETUPS, WINDOW, Setup
from tests.core.naive_manager import NaiveGroup

MAX_MODEL_LEN = 40
IN_FLIGHT = 9
HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
KINDS = {
    "full": FULL.groups,
    "window": WINDOW.groups,
    "hybrid": HYBRID.groups,
    "sizes": SETUPS["hybrid_sizes"].groups,
    "pools": (NaiveGroup(2), NaiveGroup(2, window=3, pool=1), NaiveGroup(4, pool=1)),
}


def manager_of(groups: tuple[NaiveGroup, ...], pool_size: int, **options: object) -> KVCacheManager:
    setup = Setup(groups, max_model_len=MAX_MODEL_LEN, max_in_flight=IN_FLIGHT)
    return setup.manager([pool_size] * setup.num_pools, **options)


def request_of(name: str, rng: np.random.Generator, **options: object) -> Request:
    prompt = np.zeros(MAX_MODEL_LEN, np.int32)[: rng.integers(1, 20)]
    prompt[rng.integers(0, prompt.size) :] = rng.integers(0, 2)
    most = int(rng.integers(1, MAX_MODEL_LEN - prompt.size + 1))
    return Request(name, prompt, max_tokens=most, block_hasher=HASHER, **options)


class Simulation:
    """A scheduler without preemption: it asserts that no call of an admitted request is refused."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.rng = np.random.default_rng(seed)
        self.running: list[Request] = []
        self.num_refused = self.num_finished = 0

    def try_to_admit(self, request: Request) -> bool:
        hit, length = self.manager.get_computed_blocks(request)
        new = min(request.num_tokens - length, int(self.rng.integers(1, IN_FLIGHT - 1)))
        lookahead = int(self.rng.integers(0, 3))
        before = self.manager.snapshot()
        if self.manager.allocate_slots(request, new, length, hit, lookahead) is None:
            assert self.manager.snapshot() == before
            self.num_refused += 1
            return False
        request.num_computed_tokens = length + new
        self.running.append(request)
        self.sample(request)
        return True

    def sample(self, request: Request) -> None:
        if request.num_computed_tokens == request.num_tokens:
            if request.num_output_tokens == request.max_tokens:
                self.manager.free(request)
                self.running.remove(request)
                self.num_finished += 1
            else:
                request.append_output_token_ids(int(self.rng.integers(0, 2)))

    def step(self) -> None:
        chosen = [request for request in self.running if self.rng.random() < 0.8]
        if not chosen:
            return
        budget = self.rng.integers(1, IN_FLIGHT + 1, len(chosen))
        left = [request.num_tokens - request.num_computed_tokens for request in chosen]
        new = np.minimum(budget, left)
        if self.rng.random() < 0.7:
            rows = np.array([request.row for request in chosen])
            assert self.manager.plan_step(rows, new).num_planned == len(chosen)
        else:
            for request, count in zip(chosen, new.tolist(), strict=True):
                assert self.manager.allocate_slots(request, count) is not None
        for request, count in zip(chosen, new.tolist(), strict=True):
            request.num_computed_tokens += count
            self.sample(request)


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_admitted_request_finishes(groups: tuple[NaiveGroup, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    simulation = Simulation(manager_of(groups, int(rng.integers(30, 90)), reserve=True), seed)
    for i in range(60):
        request = request_of(f"r{i}", rng)
        while not simulation.try_to_admit(request) and simulation.running:
            simulation.step()
        simulation.step()
        simulation.manager.check_invariants()
    while simulation.running:
        simulation.step()
    assert simulation.num_refused > 0
    assert simulation.num_finished > 30
    assert simulation.manager.usage == 0.0


def test_a_request_alone_finishes_by_vllms_rule() -> None:
    """In every pool that can hold a request of the longest length, as start-up demands."""
    for groups in KINDS.values():
        worst = max(manager_of(groups, 1_000).coordinator.worst_case_blocks(MAX_MODEL_LEN))
        for pool_size in range(worst + 1, worst + 4):
            simulation = Simulation(manager_of(groups, pool_size), seed=pool_size)
            request = Request("alone", [0] * 15, max_tokens=MAX_MODEL_LEN - 15, block_hasher=HASHER)
            assert simulation.try_to_admit(request)
            while simulation.running:
                simulation.step()


def test_a_pool_one_block_short_admits_nobody_of_the_longest_length() -> None:
    for groups in KINDS.values():
        setup = Setup(groups, max_model_len=MAX_MODEL_LEN, max_in_flight=IN_FLIGHT)
        needs = manager_of(groups, 1_000).coordinator.worst_case_blocks(MAX_MODEL_LEN)
        for pool_id in range(len(needs)):
            sizes = [need + 1 - (pool_id == i) for i, need in enumerate(needs)]
            manager = setup.manager(sizes, reserve=True)
            assert manager.allocate_slots(Request("r", [1]), 1) is None
            assert manager.allocate_slots(Request("s", [1], max_tokens=1), 1) is not None


def test_the_reservation_ends_with_the_request() -> None:
    manager = manager_of(FULL.groups, 21, reserve=True)
    first, second = Request("a", [1] * 30, max_tokens=10), Request("b", [1] * 3, max_tokens=1)
    assert manager.allocate_slots(first, 9) is not None
    assert manager.allocate_slots(second, 3) is None
    manager.free(first)
    assert manager.allocate_slots(second, 3) is not None


def test_more_than_was_reserved_is_an_error_and_changes_nothing() -> None:
    manager = manager_of(FULL.groups, 40, reserve=True)
    request = Request("r", [1] * 4, max_tokens=2)
    with pytest.raises(ValueError, match=r"expected at most max_in_flight_tokens = 9 .* got 10"):
        manager.allocate_slots(Request("s", [1] * 20), 10)
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    before = manager.snapshot()
    with pytest.raises(ValueError, match=r"expected at most the 6 reserved slots .* got 8"):
        manager.allocate_slots(request, 1, num_lookahead_tokens=3)
    with pytest.raises(ValueError, match=r"expected at most the 6 reserved slots .* got 8"):
        manager.plan_step([request.row], 1, num_lookahead_tokens=3)
    with pytest.raises(ValueError, match=r"max_in_flight_tokens = 9 .* got 10"):
        manager.plan_step([request.row], 8, num_in_flight_tokens=2)
    assert manager.snapshot() == before


def test_max_tokens_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected max_tokens >= 1, got 0"):
        Request("r", [1], max_tokens=0)


@pytest.mark.parametrize("break_it", [lambda r: r.totals.__setitem__(0, 3), lambda r: r._slots.__setitem__(1, 1)])
def test_broken_laws_are_found(break_it: object) -> None:
    manager = manager_of(FULL.groups, 40)
    manager = KVCacheManager(manager.kv_cache_config, MAX_MODEL_LEN, 2, reserve=True)
    request = Request("r", [1])
    manager.allocate_slots(request, 1)
    reservations = manager.coordinator.reservations
    assert reservations is not None
    totals, slots = list(reservations.totals), reservations._slots.copy()
    break_it(reservations)  # type: ignore[operator]
    with pytest.raises(InvariantError, match="V1"):
        manager.check_invariants()
    reservations.totals, reservations._slots = totals, slots
