"""With `reserve=True` whoever is admitted finishes: no later call is refused, whatever the others do."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.core.manager.reservations import Reservations
from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import InvariantError
from tests.core.manager.manager_lockstep import FULL, HYBRIDS, KINDS, SETUPS, Setup
from tests.core.manager.naive_manager import MAX_ENCODER, NaiveGroup

MAX_MODEL_LEN = 40
IN_FLIGHT = 9
NUM_REQUESTS = 30
HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
CHOSEN = {name: SETUPS[name].groups for name in (*KINDS, *HYBRIDS, "window_1", "hybrid_sizes")} | {
    "pools": (NaiveGroup(2), NaiveGroup(2, window=3, pool=1), NaiveGroup(4, pool=1)),
    "many": (NaiveGroup(4), NaiveGroup(2, window=7), NaiveGroup(2, chunk=6, pool=1), NaiveGroup(2, cross=True)),
}
every_kind = pytest.mark.parametrize("groups", CHOSEN.values(), ids=CHOSEN)


def manager_of(groups: tuple[NaiveGroup, ...], pool_sizes: int | list[int], **options: object) -> KVCacheManager:
    setup = Setup(groups, max_model_len=MAX_MODEL_LEN, max_in_flight=IN_FLIGHT)
    return setup.manager([pool_sizes] * setup.num_pools if isinstance(pool_sizes, int) else pool_sizes, **options)


def worst_case(groups: tuple[NaiveGroup, ...]) -> list[int]:
    """Blocks of a request of the longest length, per pool."""
    return manager_of(groups, 1_000).block_needs.worst_case(MAX_MODEL_LEN)


def request_of(name: str, rng: np.random.Generator, **options: object) -> Request:
    prompt = np.zeros(MAX_MODEL_LEN, np.int32)[: rng.integers(1, 20)]
    prompt[rng.integers(0, prompt.size) :] = rng.integers(0, 2)
    most = int(rng.integers(1, MAX_MODEL_LEN - prompt.size + 1))
    return Request(name, prompt, max_tokens=most, block_hasher=HASHER, **options)


def test_rows_are_as_many_as_are_asked_for() -> None:
    reservations = Reservations([BlockPool(9)], IN_FLIGHT)
    for num_rows in (2, 5):
        reservations.reserve_rows(num_rows)
        reservations.add(num_rows - 1, 4, [2])
        assert reservations.blocks_of(num_rows - 1) == [2]
        with pytest.raises(IndexError):
            reservations.blocks_of(num_rows)
    assert reservations.totals == [4]


@pytest.mark.parametrize(
    ("num_slots", "settled", "message"),
    [(6, 2, "row 1: expected at most the 5 reserved slots"), (5, 0, "max_in_flight_tokens = 4 .* got 5")],
)
def test_a_row_that_its_reservation_does_not_cover_is_found(num_slots: int, settled: int, message: str) -> None:
    """However far the rows around it are."""
    reservations = Reservations([BlockPool(99)], max_in_flight_tokens=4)
    reservations.reserve_rows(3)
    for row, slots in enumerate((40, 5, 40)):
        reservations.add(row, slots, [10])
    reservations.check_rows(np.arange(3), np.array([30, 5, 30]), np.array([26, 1, 26]))
    with pytest.raises(ValueError, match=message):
        reservations.check_rows(np.arange(3), np.array([30, num_slots, 30]), np.array([26, settled, 26]))


class Simulation:
    """A scheduler without preemption: it asserts that no call of an admitted request is refused."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.rng = np.random.default_rng(seed)
        self.running: list[Request] = []
        self.lookahead: dict[str, int] = {}  # as at admission
        self.num_refused = self.num_finished = 0

    def try_to_admit(self, request: Request) -> bool:
        hit, length = self.manager.get_computed_blocks(request)
        new = min(request.num_tokens - length, int(self.rng.integers(1, IN_FLIGHT - 1)))
        new = self.step_of(request, new, length)
        lookahead = self.lookahead[request.request_id] = int(self.rng.integers(0, 3))
        encoder = int(self.rng.integers(0, MAX_ENCODER + 1)) if self.manager.groups.reads_encoder else 0
        before = self.manager.snapshot()
        if self.manager.allocate_slots(request, new, length, hit, lookahead, num_encoder_tokens=encoder) is None:
            assert self.manager.snapshot() == before
            self.num_refused += 1
            return False
        request.num_computed_tokens = length + new
        self.running.append(request)
        self.sample(request)
        return True

    def step_of(self, request: Request, new: int, num_hit: int = 0) -> int:
        """As many new tokens as one step may take; one it always may."""
        return max(self.manager.limit_step(request, new, num_hit), 1)

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
        lookahead = np.array([self.lookahead[request.request_id] for request in chosen])
        left = [request.num_tokens - request.num_computed_tokens for request in chosen]
        most = np.minimum(self.rng.integers(1, IN_FLIGHT - 1, len(chosen)), left)
        new = np.array([self.step_of(request, count) for request, count in zip(chosen, most.tolist(), strict=True)])
        room = IN_FLIGHT - new - lookahead
        in_flight = np.minimum(self.rng.integers(0, room + 1), [request.num_computed_tokens for request in chosen])
        if self.rng.random() < 0.7:
            rows = np.array([request.row for request in chosen])
            options = {"num_lookahead_tokens": lookahead, "num_in_flight_tokens": in_flight}
            assert self.manager.plan_step(rows, new, **options).num_planned == len(chosen)
        else:
            for request, count, drafted, unread in zip(chosen, new, lookahead, in_flight, strict=True):
                options = {"num_lookahead_tokens": int(drafted), "num_in_flight_tokens": int(unread)}
                assert self.manager.allocate_slots(request, int(count), **options) is not None
        for request, count in zip(chosen, new.tolist(), strict=True):
            request.num_computed_tokens += count
            self.sample(request)


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_every_admitted_request_finishes(groups: tuple[NaiveGroup, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [1 + int(worst * rng.uniform(1.0, 3.0)) for worst in worst_case(groups)]
    simulation = Simulation(manager_of(groups, sizes, reserve=True), seed)
    for i in range(NUM_REQUESTS):
        request = request_of(f"r{i}", rng)
        while not simulation.try_to_admit(request) and simulation.running:
            simulation.step()
        simulation.step()
        simulation.manager.check_invariants()
    while simulation.running:
        simulation.step()
    assert simulation.num_refused > 0
    assert simulation.num_finished == NUM_REQUESTS
    assert simulation.manager.usage == 0.0


@every_kind
def test_a_request_alone_finishes_by_vllms_rule(groups: tuple[NaiveGroup, ...]) -> None:
    """In every pool that can hold a request of the longest length, as start-up demands."""
    for more in range(3):
        simulation = Simulation(manager_of(groups, [worst + 1 + more for worst in worst_case(groups)]), seed=more)
        request = Request("alone", [0] * 15, max_tokens=MAX_MODEL_LEN - 15, block_hasher=HASHER)
        assert simulation.try_to_admit(request)
        while simulation.running:
            simulation.step()
        assert simulation.num_finished == 1


@every_kind
def test_a_pool_one_block_short_admits_nobody_of_the_longest_length(groups: tuple[NaiveGroup, ...]) -> None:
    needs, least = worst_case(groups), manager_of(groups, 1_000).block_needs.worst_case(2)
    for short in range(len(needs)):
        sizes = [max(need + (pool_id != short), 2) for pool_id, need in enumerate(needs)]
        for request, blocks in ((Request("r", [1]), needs), (Request("s", [1], max_tokens=1), least)):
            fits = all(size > count for size, count in zip(sizes, blocks, strict=True))
            assert (manager_of(groups, sizes, reserve=True).allocate_slots(request, 1) is not None) == fits


@every_kind
def test_a_short_request_reserves_what_one_step_takes(groups: tuple[NaiveGroup, ...]) -> None:
    """Where all tokens fit into one step; a recurrent state of more than a block may be reached in several."""
    states = [group.block_size for group in groups if group.mamba == "align"]
    for num_tokens in range(1, 1 + min([IN_FLIGHT, *states])):
        manager = manager_of(groups, 1_000)
        before = [pool.num_free_blocks for pool in manager.block_pools]
        encoder = MAX_ENCODER if manager.groups.reads_encoder else 0
        request = Request("r", [1] * num_tokens)
        assert manager.allocate_slots(request, num_tokens, num_encoder_tokens=encoder) is not None
        taken = [free - pool.num_free_blocks for free, pool in zip(before, manager.block_pools, strict=True)]
        assert manager.block_needs.worst_case(num_tokens) == taken


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
    reservations = manager.reservations
    assert reservations is not None
    totals, slots = list(reservations.totals), reservations._slots.copy()
    break_it(reservations)  # type: ignore[operator]
    with pytest.raises(InvariantError, match="V1"):
        manager.check_invariants()
    reservations.totals, reservations._slots = totals, slots
