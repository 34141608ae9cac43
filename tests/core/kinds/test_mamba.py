"""Recurrent layers: a state per block end, at most one new block a step, and hits that hold the state they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    ReleaseRules,
    Request,
)
from kvjax.core.kinds.recurrent import RecurrentManager
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.step.step_builder import build_step_plan
from kvjax.errors import InvariantError

SIZE = 4
FULL = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype="float32")
HASHER = BlockHasher(SIZE, "xxhash_cbor", seed="0")


def state(mode: str = "align", drafts: int = 0, **options: Any) -> MambaSpec:
    shape: dict[str, Any] = {"block_size": SIZE, "shapes": ((3, 2), (2, 5)), "dtypes": ("bfloat16", "float32")}
    return MambaSpec(mamba_cache_mode=mode, num_speculative_blocks=drafts, **(shape | options))


def make_manager(*specs: KVCacheSpec, num_blocks: int = 60, **options: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig.single_pool(num_blocks, *specs), 64, SIZE, **options)


def admit(manager: KVCacheManager, name: str, num_tokens: int, first: int | None = None) -> Request:
    """A request that ran its first step, of all tokens or of `first`."""
    request = Request(name, range(num_tokens), block_hasher=HASHER)
    step(manager, request, num_tokens if first is None else first)
    return request


def step(manager: KVCacheManager, request: Request, num_new: int, **options: Any) -> None:
    assert manager.allocate_slots(request, num_new, **options) is not None
    request.num_computed_tokens += num_new
    manager.new_step_starts()


def table(manager: KVCacheManager, request: Request, group_id: int = 0) -> list[int]:
    return manager.get_block_ids(request.request_id)[group_id]


# What a page is.


def test_an_array_of_a_state_may_be_one_number() -> None:
    assert state(shapes=((1, 1),), dtypes=("float32",)).page_size_bytes == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: state("all"), "expected mamba_cache_mode none or align, got 'all'"),
        (lambda: state(shapes=()), "expected a dtype for each of one or more shapes"),
        (lambda: state(dtypes=("float32",)), "expected a dtype for each of one or more shapes"),
        (lambda: state(shapes=((3, 0), (2, 5))), "expected sizes >= 1 in shapes"),
        (lambda: state(dtypes=("float32", "int3")), "expected a KV-cache dtype"),
        (lambda: state(drafts=-1), "expected num_speculative_blocks >= 0, got -1"),
        (lambda: state(page_size_padded=51), "expected page_size_padded >= 52, the bytes of a state, got 51"),
        (lambda: state(block_size=0), "expected block_size >= 1, got 0"),
    ],
)
def test_specs_that_can_not_be(make: Callable[[], KVCacheSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_context_parallelism_is_not_for_states() -> None:
    with pytest.raises(NotImplementedError, match="mamba attention does not work with context parallelism"):
        make_manager(state(), dcp_world_size=2)


# Tables.


def test_none_keeps_its_blocks_for_life() -> None:
    manager = make_manager(state("none", drafts=2))
    request = admit(manager, "r", 10)
    held = table(manager, request)
    assert len(held) == 3
    for _ in range(30):
        request.append_output_token_ids(1)
        step(manager, request, 1, num_lookahead_tokens=2)
    assert table(manager, request) == held
    assert manager.get_computed_blocks(Request("s", range(40), block_hasher=HASHER))[1] == 0


def test_align_passes_over_columns_and_gives_back_what_is_two_steps_old() -> None:
    manager = make_manager(state(), retention_interval=SIZE)
    request = admit(manager, "r", 15, first=8)
    [_, first] = ids = table(manager, request)
    assert ids[0] == 0
    step(manager, request, 7)
    assert table(manager, request)[:3] == [0, first, 0]
    second = table(manager, request)[3]
    request.append_output_token_ids([1])
    step(manager, request, 1)
    assert table(manager, request) == [0, 0, 0, second]
    assert manager.block_pool.ref_count[first] == 0


def test_a_child_gets_the_state_of_the_tokens_it_shares() -> None:
    """That of the computed tokens, though blocks of the next step are allocated already."""
    manager = make_manager(state())
    request = admit(manager, "r", 9, first=4)
    [computed] = table(manager, request)
    assert manager.allocate_slots(request, 4) is not None
    assert table(manager, request)[0] == computed
    (child,) = manager.fork(request, 1) or ()
    assert table(manager, child) == [computed]


# Hits.


def test_a_request_that_hits_a_state_of_this_step_can_wait_for_it() -> None:
    """With `defer_fresh_hits` the lookup finds the state, and slots are given when it is computed."""
    manager = make_manager(FULL, state(), rules=ReleaseRules(defer_fresh_hits=True))
    first, second = (Request(name, range(10), block_hasher=HASHER) for name in ("first", "second"))
    assert manager.allocate_slots(first, 8) is not None
    blocks, num_tokens = manager.get_computed_blocks(second)
    assert num_tokens == 8
    before = manager.snapshot()
    assert manager.allocate_slots(second, 2, num_tokens, blocks) is None
    assert manager.snapshot() == before
    manager.new_step_starts()
    assert manager.allocate_slots(second, 2, num_tokens, blocks) is not None
    manager.check_invariants()


def test_a_lookup_asks_for_columns_in_chunks_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one state that is cached lies at the first of 1,000 blocks."""
    manager = KVCacheManager(KVCacheConfig.single_pool(60, state()), 8_000, SIZE)
    admit(manager, "r", SIZE)
    asked, find_each = [], BlockPool.find_each

    def noted(pool: BlockPool, hashes: Any, group_id: int) -> np.ndarray:
        asked.append(len(hashes))
        return find_each(pool, hashes, group_id)

    monkeypatch.setattr(BlockPool, "find_each", noted)
    request = Request("s", range(4_000), block_hasher=HASHER)
    assert manager.get_computed_blocks(request)[1] == SIZE
    assert asked[:5] == [32, 64, 128, 256, 512]
    assert sum(asked) <= 1_000


# Steps that end where blocks end.


def test_a_step_may_not_leave_a_block_it_began_inside() -> None:
    manager = make_manager(FULL, state(drafts=1))
    request = admit(manager, "r", 20, first=3)
    other = admit(manager, "o", 7, first=4)
    before = manager.snapshot()
    message = "expected a step from 3 computed tokens to end at 4, .* got 3 new tokens; split it"
    with pytest.raises(ValueError, match=message):
        manager.allocate_slots(request, 3)
    with pytest.raises(ValueError, match=message):
        manager.plan_step([other.row, request.row], 3)
    with pytest.raises(ValueError, match="expected a step from 5 computed tokens to end at 8"):
        manager.allocate_slots(Request("n", range(30, 50), block_hasher=HASHER), 7, num_external_computed_tokens=5)
    assert manager.snapshot() == before
    assert manager.limit_step(request, 3) == 1
    step(manager, request, 2)  # a token and a draft


def test_limited_steps_are_allowed_and_finish() -> None:
    rng = np.random.default_rng(0)
    for case in range(200):
        manager = make_manager(FULL, state(), state(block_size=8), num_blocks=200)
        request = Request("r", rng.integers(0, 9, int(rng.integers(1, 60))), block_hasher=HASHER)
        budget = int(rng.integers(8, 20))
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            new = manager.limit_step(request, min(left, budget))
            assert 0 < new <= min(left, budget), f"case {case}"
            step(manager, request, new)
        full = request.num_tokens // 8 * 8
        again = Request("s", request.token_ids.tolist() + [1], block_hasher=HASHER)
        assert manager.get_computed_blocks(again)[1] == full, "the last state that all groups have"


@pytest.mark.parametrize("num_prompt", range(1, 2 * SIZE + 2))
def test_steps_of_decoding_are_never_cut(num_prompt: int) -> None:
    """Neither is a step of a request without recurrent states, prompt or not."""
    drafting, plain = make_manager(FULL, state(drafts=3)), make_manager(FULL)
    request = admit(drafting, "r", num_prompt)
    request.append_output_token_ids([1])
    assert [drafting.limit_step(request, 1 + drafts) for drafts in range(4)] == [1, 2, 3, 4]
    assert [plain.limit_step(Request("s", range(40)), count) for count in range(1, 41)] == [*range(1, 41)]


# What the device is told.


def test_a_plan_without_blocks_is_refused() -> None:
    manager = make_manager(state())
    request = admit(manager, "r", 9, first=4)
    with pytest.raises(ValueError, match=r"group 0: expected the blocks of a state after 9 tokens, got 1 blocks"):
        build_step_plan(manager, np.array([request.row]), np.array([5]))


def test_a_state_is_right_wherever_it_is_read() -> None:
    """Pages hold the tokens of their state: every read finds those computed before, a hit's included."""
    rng = np.random.default_rng(1)
    trunk = rng.integers(0, 2, 40)
    manager = make_manager(FULL, state(), num_blocks=40)
    pages: dict[int, list[int]] = {}
    running: list[Request] = []
    hits = 0
    for number in range(300):
        if len(running) < 4:
            prompt = [*trunk[: int(rng.integers(0, 40))], *rng.integers(0, 2, 3)]
            request = Request(f"r{number}", prompt, block_hasher=HASHER)
            hit, length = manager.get_computed_blocks(request)
            new = manager.limit_step(request, request.num_tokens - length, length)
            if manager.allocate_slots(request, new, length, hit) is not None:
                request.num_computed_tokens = length
                run_states(manager, pages, [request], [new])
                running.append(request)
                hits += length > 0
        manager.new_step_starts()
        chosen = [request for request in running if request.num_computed_tokens < request.num_tokens]
        new_tokens = [manager.limit_step(r, r.num_tokens - r.num_computed_tokens) for r in chosen]
        planned = manager.plan_step([r.row for r in chosen], new_tokens).num_planned
        run_states(manager, pages, chosen[:planned], new_tokens)
        for request in running[:]:
            if request.num_tokens > 50 or rng.random() < 0.05 or planned < len(chosen):
                manager.free(request)
                running.remove(request)
            elif request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([int(rng.integers(0, 2))])
        manager.check_invariants()
    assert hits > 20


def run_states(manager: KVCacheManager, pages: dict[int, list[int]], requests: list[Request], new: list[int]) -> None:
    """What the device does: all reads, then all writes."""
    if not requests:
        return
    step_plan = build_step_plan(manager, np.array([r.row for r in requests]), np.array(new[: len(requests)]))
    plan = step_plan.groups[1]
    assert plan.state_read is not None
    assert plan.state_write is not None
    names = {request.row: request for request in requests}
    before = {page: list(tokens) for page, tokens in pages.items()}
    for row, count, read, write in zip(
        step_plan.rows.tolist(), step_plan.num_new_tokens.tolist(), plan.state_read, plan.state_write, strict=True
    ):
        request = names[row]
        done = request.num_computed_tokens
        tokens = request.token_ids.tolist()
        assert (before[int(read)] if done else []) == tokens[:done]
        pages[int(write)] = tokens[: done + count]
        request.num_computed_tokens += count


def test_check_invariants_finds_a_lost_state() -> None:
    manager = make_manager(state(drafts=1))
    request = admit(manager, "r", 6)
    kind = manager.groups.managers[0]
    assert isinstance(kind, RecurrentManager)
    ids = kind.block_tables[0, request.row].copy()
    kind.block_tables[0, request.row, kind.num_blocks[request.row] - 1] = 0
    with pytest.raises(InvariantError, match=r"G2, groups \(0,\): row 0 lacks a running or speculative block"):
        kind.check_invariants([request.row])
    kind.block_tables[0, request.row] = ids
