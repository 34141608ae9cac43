"""Forks share blocks, copy a page for each request that writes to a shared one, and everyone reads back its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.core.step.step_builder import build_step_plan
from kvjax.errors import UnknownRequestError
from tests.core.manager.manager_lockstep import FULL, HYBRID, IDLE, SETUPS, WINDOW, Setup
from tests.core.manager.naive_manager import MAX_ENCODER, NaiveGroup
from tests.core.manager.page_contents import PageContents, Writes
from tests.core.manager.random_forks import RandomForks

OPTIONS: list[dict[str, Any]] = [{}, {"zero_new_pages": True}, {"reserve": True}]
FOUR = Setup((NaiveGroup(4), NaiveGroup(4, window=6), NaiveGroup(8, pool=1)), hash_block_size=4, max_model_len=40)


def running(
    manager: KVCacheManager, num_tokens: int, name: str = "parent", salt: str | None = None, **options: Any
) -> Request:
    """A request whose prompt is computed."""
    hasher = BlockHasher(manager.hash_block_size, seed="0") if manager.enable_caching else None
    request = Request(name, range(num_tokens), cache_salt=salt, block_hasher=hasher, **options)
    encoder = MAX_ENCODER if manager.groups.reads_encoder else 0
    assert manager.allocate_slots(request, num_tokens, num_encoder_tokens=encoder) is not None
    request.num_computed_tokens = num_tokens
    return request


def decode(manager: KVCacheManager, requests: list[Request], first_token: int = 100) -> None:
    """A token of its own for each, and slots for it."""
    for i, request in enumerate(requests):
        request.append_output_token_ids(first_token + i)
    assert manager.plan_step([request.row for request in requests], 1).num_planned == len(requests)


def num_copies(manager: KVCacheManager) -> list[int]:
    return [copies.sources.size for copies in manager.take_page_copies()]


def unchanged(manager: KVCacheManager, call: Callable[[], object], error: type[Exception], message: str) -> None:
    before = manager.snapshot()
    with pytest.raises(error, match=message):
        call()
    assert manager.snapshot() == before


# -- the laws


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETUPS)
def test_everyone_reads_back_its_own_tokens(name: str, seed: int) -> None:
    """Random forks, in bulk and request by request, with the same states after each call."""
    runs = [RandomForks(SETUPS[name], seed, bulk, OPTIONS[seed]) for bulk in (True, False)]
    for _ in range(15):
        for run in runs:
            run.step()
    assert runs[0].snapshots == runs[1].snapshots


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 20))])
@pytest.mark.parametrize("name", IDLE)
def test_states_that_are_cached_apart_come_back(name: str, seed: int) -> None:
    """They are loaded into the page that a request runs on, and stored where blocks end."""
    run = RandomForks(IDLE[name], seed, bulk=bool(seed % 2), options=OPTIONS[seed % 2])
    for _ in range(25):
        run.step()
    assert run.device.num_moved


@pytest.mark.parametrize("name", SETUPS)
def test_a_fork_of_8_shares_all_full_blocks_and_copies_a_page_for_each_child_that_writes(name: str) -> None:
    setup = SETUPS[name]
    manager = setup.manager([100] * setup.num_pools)
    device = PageContents(manager)
    device.encoders.add("parent")
    request = running(manager, 7, salt="input")
    request.num_computed_tokens = 0
    device.run([Writes(request, 7)])
    request.num_computed_tokens = 7
    held = [pool.num_free_blocks for pool in manager.block_pools]
    children = manager.fork(request, 8)
    assert children is not None
    if not any(group.drafts for group in setup.groups):
        assert [pool.num_free_blocks for pool in manager.block_pools] == held
    for group_id, (group, ids) in enumerate(zip(setup.groups, manager.get_block_ids("parent"), strict=True)):
        for child in children:
            of_child = manager.get_block_ids(child.request_id)[group_id]
            shared = len(of_child) - group.drafts * (group.mamba is not None)
            assert of_child[:shared] == ([0] * (shared - 1) + [ids[shared - 1]] if group.mamba else ids)
    decode(manager, list(children))
    num_partial = sum(
        not m.reads_encoder and 7 % m.block_size > 0 for m in manager.groups.managers for _ in m.group_ids
    )
    device.run([Writes(child, 1) for child in children])
    for child in children:
        child.num_computed_tokens += 1
        device.check(child, 8)
    device.check(request, 7)
    assert device.num_copies == 8 * num_partial


@pytest.mark.parametrize("setup", [FULL, WINDOW, HYBRID, FOUR], ids=["full", "window", "hybrid", "two pools"])
def test_the_parents_page_goes_to_the_last_that_writes(setup: Setup) -> None:
    """The parent is freed: of 8 children 7 take a copy. If the parent writes too, so do all children but one."""
    manager = setup.manager([200] * setup.num_pools)
    groups_of_pool = [sum(group.pool == pool for group in setup.groups) for pool in range(setup.num_pools)]
    request = running(manager, 7)
    children = manager.fork(request, 8)
    assert children is not None
    manager.free(request)
    decode(manager, list(children))
    assert num_copies(manager) == [7 * groups for groups in groups_of_pool]
    second = running(manager, 7, "second")
    more = manager.fork(second, 7)
    assert more is not None
    decode(manager, [second, *more], 200)
    assert num_copies(manager) == [7 * groups for groups in groups_of_pool]
    decode(manager, [second, *more, *children], 300)
    assert num_copies(manager) == [0] * setup.num_pools


def test_the_last_holder_writes_in_place_while_copies_wait() -> None:
    manager = FULL.manager([20])
    children = manager.fork(request := running(manager, 3), 2)
    assert children is not None
    manager.free(request)
    decode(manager, list(children))
    assert [manager.get_block_ids(child.request_id)[0][1] for child in children] == [3, 2]
    assert num_copies(manager) == [1]


def test_a_copy_that_nobody_needs_any_more_is_not_made() -> None:
    manager = Setup((NaiveGroup(4),)).manager([5])
    request = running(manager, 2)
    first, second = manager.fork(request, 2) or ()
    decode(manager, [first])
    manager.free(first)  # its copy, block 2, is free, and dealt again last
    decode(manager, [second])
    (copies,) = manager.take_page_copies()
    assert (copies.sources.tolist(), copies.destinations.tolist()) == ([1], [3])


def test_a_destination_that_is_dealt_as_a_new_block_is_zeroed_and_not_copied_to() -> None:
    manager = FULL.manager([4], zero_new_pages=True)
    request = running(manager, 3)
    (child,) = manager.fork(request, 1) or ()
    decode(manager, [child])
    manager.free(child)
    running(manager, 2, "other")
    assert num_copies(manager) == [0]
    assert [ids.tolist() for ids in manager.take_pages_to_zero()] == [[1, 2, 3]]


def test_a_block_that_the_parent_filled_is_no_hit_once_a_child_writes_there() -> None:
    """The parent's token in flight, unknown at the fork, filled the shared block; the child samples another."""
    setup = Setup((NaiveGroup(4),), hash_block_size=4)
    manager = setup.manager([20])
    request = running(manager, 7)
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens = 8
    (child,) = manager.fork(request, 1, num_in_flight_tokens=2) or ()
    assert (child.num_computed_tokens, child.num_tokens) == (6, 7)
    request.append_output_token_ids(50)
    manager.cache_blocks(request, 8)
    same = Request("same", [*range(7), 50, 9], block_hasher=request.block_hasher)
    assert manager.get_computed_blocks(same)[1] == 8
    manager.free(request)
    assert manager.allocate_slots(child, 1) is not None
    assert num_copies(manager) == [0]
    assert manager.get_computed_blocks(same)[1] == 4


def test_a_block_that_a_request_filled_itself_stays_a_hit() -> None:
    """Forked while its step is planned; the child is gone when the step is planned again."""
    manager = FULL.manager([20])
    request = Request("parent", range(4), block_hasher=BlockHasher(2, seed="0"))
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    assert manager.allocate_slots(request, 1) is not None
    (child,) = manager.fork(request, 1) or ()
    manager.free(child)
    assert manager.allocate_slots(request, 1) is not None
    assert manager.block_pool.num_hashed_blocks == 2


def test_admission_of_a_whole_sequence_counts_the_copy() -> None:
    manager = FULL.manager([6])
    request = Request("parent", range(8))
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    (child,) = manager.fork(request, 1) or ()
    manager.block_pool.get_new_block()  # 2 of 5 are free; the child lacks 2, and a copy
    assert manager.allocate_slots(child, 1, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(child, 1) is not None
    manager.block_pool.free_blocks([3])


def test_children_have_their_parents_encoder_tokens() -> None:
    manager = SETUPS["full_cross"].manager([20])
    (child,) = manager.fork(running(manager, 3, salt="input"), 1) or ()
    decode(manager, [child])
    plan = build_step_plan(manager, np.array([child.row]), np.array([1]))
    assert plan.groups[1].seq_lens.tolist() == [MAX_ENCODER]


def test_children_of_a_request_that_registers_nothing_register_nothing() -> None:
    manager = FULL.manager([20])
    request = running(manager, 5, skip_writing_prefix_cache=True)
    children = manager.fork(request, 2)
    assert children is not None
    decode(manager, list(children))
    assert manager.block_pool.num_hashed_blocks == 0


def test_reserve_counts_children_with_the_worst_case_of_their_parent() -> None:
    setup = Setup((NaiveGroup(2),))
    manager = setup.manager([13], reserve=True)
    request = running(manager, 3, max_tokens=5)  # 4 blocks of 12
    before = manager.snapshot()
    assert manager.fork(request, 3) is None
    assert manager.snapshot() == before
    children = manager.fork(request, 2)
    assert children is not None
    manager.free(request)
    assert manager.fork(children[0], 2) is None
    assert manager.fork(children[0], 1) is not None


def test_a_refused_plan_keeps_the_copies() -> None:
    manager = FULL.manager([20])
    (child,) = manager.fork(running(manager, 3), 1) or ()
    decode(manager, [child])
    with pytest.raises(ValueError, match="distinct rows"):
        build_step_plan(manager, np.array([child.row, child.row]), np.array([1, 1]))
    assert num_copies(manager) == [1]


# -- names and bad input


def test_names_are_free_ones_or_the_callers() -> None:
    manager = FULL.manager([20])
    request = running(manager, 3)
    first = manager.fork(request, 2)
    assert [child.request_id for child in first or ()] == ["parent.1", "parent.2"]
    second = manager.fork(request, 2, request_ids=["a", "b"])
    assert [child.request_id for child in second or ()] == ["a", "b"]
    assert [child.request_id for child in manager.fork(request, 1) or ()] == ["parent.3"]


@pytest.mark.parametrize("seed", range(20))
def test_default_names_are_nobodys(seed: int) -> None:
    """Not of who runs, nor of who was preempted and comes back, though callers choose names like those of forks."""
    rng = np.random.default_rng(seed)
    manager, names = (
        FULL.manager([400]),
        ["a", "b", *(f"{one}.{i}" for one in ("a", "a.1", "b.2") for i in range(1, 6))],
    )
    active: list[Request] = []
    preempted: list[Request] = []
    ever: set[str] = set()
    for _ in range(60):
        known = {request.request_id for request in active + preempted}
        action = rng.integers(5)
        if action == 0 and (free := [name for name in names if name not in known]):
            active.append(running(manager, 3, str(rng.choice(free))))
            ever.add(active[-1].request_id)
        elif action == 1 and preempted:
            active.append(request := preempted.pop(int(rng.integers(len(preempted)))))
            assert manager.allocate_slots(request, 3) is not None
            request.num_computed_tokens = 3
        elif action == 2 and active:
            children = manager.fork(active[int(rng.integers(len(active)))], int(rng.integers(1, 4))) or ()
            assert not ever & {child.request_id for child in children}
            active += children
            ever |= {child.request_id for child in children}
        elif action > 2 and active:
            manager.free(request := active.pop(int(rng.integers(len(active)))))
            request.num_computed_tokens = 0
            preempted += [request] if action == 3 else []


def test_bad_input() -> None:
    manager = FULL.manager([20])
    request = running(manager, 3)
    unchanged(manager, lambda: manager.fork(request, 0), ValueError, "expected n >= 1, got 0")
    for names, message in (
        (["a"], r"expected 2 distinct request_ids, got \['a'\]"),
        (["a", "a"], r"expected 2 distinct request_ids, got \['a', 'a'\]"),
        (["a", "parent"], "another request with the id 'parent' is running"),
    ):
        unchanged(manager, lambda names=names: manager.fork(request, 2, request_ids=names), ValueError, message)
    for in_flight, message in (
        (-1, "expected num_in_flight_tokens >= 0, got -1"),
        (3, "expected computed tokens to share, got 3, 3 of them in flight; fork it after its first step"),
    ):
        unchanged(
            manager,
            lambda in_flight=in_flight: manager.fork(request, 1, num_in_flight_tokens=in_flight),
            ValueError,
            message,
        )
    stranger = Request("stranger", range(3))
    unchanged(manager, lambda: manager.fork(stranger, 1), UnknownRequestError, "expected a request that runs here")
    assert manager.allocate_slots(request, 2) is not None
    request.num_computed_tokens = 4
    unchanged(manager, lambda: manager.fork(request, 1), ValueError, "at most the 3 tokens that are known, got 4")
    request.append_output_token_ids([7, 7, 7, 7])
    request.num_computed_tokens = 7
    unchanged(manager, lambda: manager.fork(request, 1), ValueError, "blocks of the 7 tokens to share, got 6 slots")


def test_blocks_that_a_window_gave_back_can_not_be_shared() -> None:
    manager = Setup((NaiveGroup(2, window=3),)).manager([20])
    request = running(manager, 6)
    request.append_output_token_ids(1)
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens = 7
    assert manager.fork(request, 1, num_in_flight_tokens=1) is not None
    unchanged(
        manager,
        lambda: manager.fork(request, 1, num_in_flight_tokens=3),
        ValueError,
        "blocks that token 4 attends to were released",
    )


def test_tokens_in_flight_can_not_be_left_out_of_a_state() -> None:
    manager = SETUPS["full_mamba"].manager([20])
    request = running(manager, 4)
    unchanged(
        manager,
        lambda: manager.fork(request, 1, num_in_flight_tokens=1),
        NotImplementedError,
        "a recurrent state holds the tokens in flight too; expected num_in_flight_tokens = 0, got 1",
    )


@pytest.mark.parametrize("num_blocks", range(4, 12))
def test_a_fork_is_refused_where_blocks_for_drafts_are_missing(num_blocks: int) -> None:
    """A child needs 2 of its own; its state page it shares."""
    manager = Setup((NaiveGroup(2, mamba="align", drafts=2),)).manager([num_blocks])
    request = running(manager, 2)  # 3 blocks
    n = (num_blocks - 4) // 2
    before = manager.snapshot()
    assert manager.fork(request, n + 1) is None
    assert manager.snapshot() == before
    assert not n or len(manager.fork(request, n) or ()) == n
