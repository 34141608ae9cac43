"""Hits that end inside blocks, by vLLM 0.33's rules: who starts from one finds what it says, whatever came between."""

from __future__ import annotations

from dataclasses import replace
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
    ManagerOptions,
    Request,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
)
from kvjax.core.kinds.recurrent import RecurrentManager
from kvjax.errors import BlockStateError

UNIT = 2
HASHER = BlockHasher(UNIT, "xxhash_cbor", seed="0")
MAX_TOKENS = 64
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, **HEADS)


def states(size: int, drafts: int = 0, checkpoints: bool = False) -> MambaSpec:
    return MambaSpec(
        block_size=size,
        shapes=((4,),),
        dtypes=("float32",),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=int(checkpoints),
        prefill_checkpoint_alignment=UNIT if checkpoints else None,
    )


def make(*specs: KVCacheSpec, num_blocks: int = 400, **options: Any) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig.single_pool(num_blocks, *specs), MAX_TOKENS, UNIT, ManagerOptions.vllm("0.33.0"), **options
    )


def request_of(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, block_hasher=HASHER)


def compute(manager: KVCacheManager, request: Request, *ends: int) -> None:
    """Steps to each of `ends`, the first from a hit."""
    for end in ends:
        hit, length = (None, 0) if request.row >= 0 else manager.get_computed_blocks(request)
        start = request.num_computed_tokens + length
        assert manager.allocate_slots(request, end - start, length, hit) is not None
        request.num_computed_tokens = end
        manager.take_page_copies()
        manager.new_step_starts()


class Device:
    """What pages hold: of a token of full attention, and of a state, all tokens up to it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages: dict[int, Any] = {}
        self.num_copies = 0

    def run(self, steps: list[tuple[Request, int, int]]) -> None:
        """Copies, then steps of requests from `start` to `end` tokens, each reading what came before."""
        [copies] = self.manager.take_page_copies()
        self.num_copies += copies.sources.size
        read = {int(to): self.pages.get(int(at)) for at, to in zip(copies.sources, copies.destinations, strict=True)}
        self.pages |= {to: dict(held) if isinstance(held, dict) else held for to, held in read.items()}
        for request, start, end in steps:
            for kind in self.manager.groups.managers:
                for group_id in kind.group_ids:
                    table = self.manager.get_block_ids(request.request_id)[group_id]
                    if isinstance(kind, RecurrentManager):
                        self.step_of_states(request, table, kind, start, end)
                    else:
                        self.step_of_tokens(request, table, kind, start, end)

    def step_of_tokens(
        self, request: Request, table: list[int], kind: SingleTypeKVCacheManager, start: int, end: int
    ) -> None:
        tokens, size = tuple(request.token_ids.tolist()), kind.block_size
        for place in range(int(kind.get_num_skipped_tokens(start)), start):
            assert self.pages[table[place // size]][place % size] == tokens[: place + 1]
        for place in range(start, end):
            page = self.pages.get(table[place // size])
            page = page if isinstance(page, dict) else {}
            self.pages[table[place // size]] = page | {place % size: tokens[: place + 1]}

    def step_of_states(self, request: Request, table: list[int], kind: RecurrentManager, start: int, end: int) -> None:
        tokens, size = tuple(request.token_ids.tolist()), kind.block_size
        if start:
            assert self.pages[table[(start - 1) // size]] == tokens[:start]
        spec, column = kind.kv_cache_spec, -(-end // size) - 2
        drops, unit = self.manager.options.use_eagle, self.manager.groups.alignment
        left = (end if drops else end - 1) // unit * unit - unit * drops  # where a kernel leaves a checkpoint
        may_leave = spec.prefill_checkpoint_alignment is not None and start + UNIT <= left < end and start % UNIT == 0
        if may_leave and column > (start - 1) // size and column >= 0 and table[column]:
            self.pages[table[column]] = tokens[:left]
        self.pages[table[(end - 1) // size]] = tokens[:end]


def next_end(rng: np.random.Generator, manager: KVCacheManager, start: int, request: Request) -> int:
    """An end that states can take: in the block that the step begins inside, else anywhere."""
    end = min(start + int(rng.integers(1, 24)), request.num_tokens)
    drops = manager.options.use_eagle
    last = (request.num_prompt_tokens - 1 + drops) // UNIT * UNIT - UNIT * drops
    if start < last < end and rng.random() < 0.6:
        end = last
    for kind in manager.groups.managers:
        if isinstance(kind, RecurrentManager) and start % kind.block_size:
            end = min(end, -(-start // kind.block_size) * kind.block_size)
    return end


SHAPES = {
    "equal blocks": (full(4), states(4)),
    "states of more": (full(2), states(8)),
    "both of more": (full(4), states(8), full(2)),
    "checkpoints": (full(2), states(4, checkpoints=True)),
    "checkpoints, drafts": (full(4), states(8, drafts=2, checkpoints=True)),
    "two groups of states": (full(2), states(4), states(4)),
    "a window of units": (full(4), states(4), SlidingWindowSpec(block_size=2, sliding_window=5, **HEADS)),
}


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("name", SHAPES)
def test_whoever_starts_from_a_hit_finds_its_tokens(name: str, interval: int | None, eagle: bool) -> None:
    """Random prompts of few beginnings in a small pool, random steps, requests that end at any time."""
    rng = np.random.default_rng(len(name))
    manager = make(*SHAPES[name], num_blocks=150, retention_interval=interval, use_eagle=eagle)
    device = Device(manager)
    trunk = rng.integers(0, 9, 48).tolist()
    prompts = [trunk[: int(rng.integers(8, 40))] + [9, i, i, i, i] for i in range(5)]
    running: list[Request] = []
    num_hits = num_inside = 0
    for step in range(120):
        manager.new_step_starts()
        planned = []
        for request in list(running):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([int(rng.integers(0, 9))])
            start = request.num_computed_tokens
            end = next_end(rng, manager, start, request)
            if (
                request.num_tokens >= MAX_TOKENS - 4
                or rng.random() < 0.08
                or manager.allocate_slots(request, end - start, num_lookahead_tokens=int(rng.integers(0, 3))) is None
            ):
                manager.free(request)
                running.remove(request)
            else:
                planned.append((request, start, end))
        for _ in range(int(rng.integers(0, 3))):
            tokens = prompts[int(rng.integers(0, 5))] + rng.integers(0, 2, int(rng.integers(0, 4))).tolist()
            new = request_of(f"r{step}.{len(running)}", tokens)
            hit, length = manager.get_computed_blocks(new)
            end = next_end(rng, manager, length, new)
            if manager.allocate_slots(new, end - length, length, hit) is not None:
                planned.append((new, length, end))
                running.append(new)
                num_hits += length > 0
                num_inside += any(length % kind.block_size for kind in manager.groups.managers)
        device.run(planned)
        for request, _, end in planned:
            request.num_computed_tokens = end
        manager.check_invariants()
    for request in running:
        manager.free(request)
    manager.check_invariants()
    assert manager.block_pool.num_free_blocks == manager.block_pool.num_usable_blocks
    assert num_hits > 20
    assert num_inside > 1
    assert device.num_copies >= num_inside


@pytest.mark.parametrize(("num_tokens", "expected"), [(7, 6), (8, 6), (9, 8), (13, 12), (30, 28)])
def test_a_prompt_hits_its_last_hash_in_every_shape(num_tokens: int, expected: int) -> None:
    """Where its steps end at the hash, or devices leave a checkpoint there."""
    for name, specs in SHAPES.items():
        manager, tokens = make(*specs), list(range(num_tokens))
        request = request_of("first", tokens)
        compute(manager, request, expected, num_tokens)
        manager.free(request)
        hit, length = manager.get_computed_blocks(request_of("second", tokens))
        assert length == expected, name
        assert [len(ids) for ids in hit.block_ids] == [-(-length // spec.block_size) for spec in specs]


def test_a_step_through_the_prompt_leaves_a_checkpoint_and_without_one_nothing() -> None:
    tokens = list(range(31))
    for has_checkpoints, expected in ((True, 30), (False, 0)):
        manager = make(full(2), states(8, checkpoints=has_checkpoints))
        before = manager.block_pool.num_free_blocks
        request = request_of("first", tokens)
        compute(manager, request, 31)
        assert before - manager.block_pool.num_free_blocks == 16 + 1 + has_checkpoints
        assert manager.get_computed_blocks(request_of("second", tokens))[1] == expected


def test_an_owner_writes_on_where_it_is_and_a_copy_is_the_hit() -> None:
    manager = make(full(2), states(4))
    owner = request_of("owner", list(range(7)))
    compute(manager, owner, 6)
    [_, tail] = manager.get_block_ids("owner")[1]
    assert manager.block_pool.is_hashed[tail]
    assert manager.allocate_slots(owner, 1) is not None
    assert manager.get_block_ids("owner")[1] == [0, tail]
    assert not manager.block_pool.is_hashed[tail]
    assert manager.get_computed_blocks(request_of("other", [*range(6), 9, 9]))[1] == 6
    [copies] = manager.take_page_copies()
    assert copies.sources.tolist() == [tail]
    assert manager.block_pool.is_hashed[copies.destinations].all()


def test_a_state_of_this_step_is_no_hit_in_it() -> None:
    """Neither one that is computed now, nor the copy that takes one over."""
    manager = make(full(2), states(4))
    owner, other = request_of("owner", list(range(7))), request_of("other", [*range(6), 9, 9])
    assert manager.allocate_slots(owner, 6) is not None
    owner.num_computed_tokens = 6
    for _ in range(2):
        hit, length = manager.get_computed_blocks(other)
        assert length == 6
        assert manager.allocate_slots(other, 2, length, hit) is None
        manager.new_step_starts()
        if owner.num_computed_tokens == 6:
            assert manager.allocate_slots(owner, 1) is not None
            owner.num_computed_tokens = 7
    assert manager.allocate_slots(other, 2, length, hit) is not None


def test_a_hit_whose_block_was_evicted_is_refused() -> None:
    manager = make(full(4), states(4))
    first = request_of("first", list(range(7)))
    compute(manager, first, 6)
    manager.free(first)
    second = request_of("second", [*range(6), 9, 9])
    hit, length = manager.get_computed_blocks(second)
    assert length == 6
    manager.evict_blocks([int(hit.block_ids[0][1])])
    before = manager.snapshot()
    with pytest.raises(BlockStateError, match="no longer cached with these tokens; look it up again"):
        manager.allocate_slots(second, 2, length, hit)
    assert manager.snapshot() == before
    assert manager.get_computed_blocks(second)[1] == 0


@pytest.mark.parametrize("eagle", [False, True])
def test_a_hit_of_full_attention_may_end_anywhere_in_its_last_block(eagle: bool) -> None:
    """A block of 8 that is full serves every unit of it; with EAGLE one unit is dropped."""
    assert not make(full(8), states(2)).groups.has_inner_hits  # nor in vLLM, unless ranks share blocks' tokens
    rules = replace(ManagerOptions.vllm("0.33.0").rules, inner_hits_of_units=True)
    manager = make(full(8), states(2), use_eagle=eagle, retention_interval=None, rules=rules)
    first = request_of("first", list(range(16)))
    compute(manager, first, *range(2, 17, 2))
    for shared in (9, 10, 11, 12, 13):
        _, length = manager.get_computed_blocks(request_of(f"s{shared}", [*range(shared), *[40] * 8]))
        assert length == (8 if not eagle else 6)
    _, length = manager.get_computed_blocks(request_of("same", list(range(16))))
    assert length == 14


def test_windows_of_larger_blocks_leave_hits_at_whole_blocks() -> None:
    window = SlidingWindowSpec(block_size=4, sliding_window=5, **HEADS)
    manager = make(full(2), states(8), window)
    assert not manager.groups.has_inner_hits
    compute(manager, first := request_of("first", list(range(23))), 8, 16, 22)
    manager.free(first)
    assert manager.get_computed_blocks(request_of("second", list(range(23))))[1] == 16


def test_the_default_and_older_releases_hit_whole_blocks() -> None:
    config = KVCacheConfig.single_pool(50, full(2), states(8))
    for options in (ManagerOptions(), ManagerOptions.vllm("0.16.0"), ManagerOptions.vllm("0.22.1")):
        assert not KVCacheManager(config, MAX_TOKENS, UNIT, options).groups.has_inner_hits


def test_a_bulk_step_is_the_steps_one_by_one() -> None:
    """`plan_step` of rows whose tails move, and of rows that do not."""
    one, bulk = make(full(2), states(4)), make(full(2), states(4))
    for manager in (one, bulk):
        requests = [request_of(f"r{i}", [i, *range(6)]) for i in range(4)]
        for i, request in enumerate(requests):
            compute(manager, request, 6 if i % 2 else 7)
        if manager is one:
            for request in requests:
                assert manager.allocate_slots(request, 1) is not None
        else:
            result = manager.plan_step([request.row for request in requests], 1)
            assert result.num_planned == 4
    assert one.snapshot() == bulk.snapshot()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prefill_checkpoint_blocks": 2}, "expected num_prefill_checkpoint_blocks of 0 or 1, got 2"),
        ({"prefill_checkpoint_alignment": 0}, "expected prefill_checkpoint_alignment >= 1, got 0"),
    ],
)
def test_checkpoint_fields_that_can_not_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MambaSpec(block_size=4, shapes=((1,),), dtypes=("int8",), **fields)


def test_checkpoint_blocks_need_the_rules_of_vllm() -> None:
    config = KVCacheConfig.single_pool(50, full(2), states(8, checkpoints=True))
    with pytest.raises(NotImplementedError, match="expected retention_interval by vLLM's rules"):
        KVCacheManager(config, MAX_TOKENS, UNIT)


def test_a_step_with_a_checkpoint_may_leave_the_block_it_began_inside() -> None:
    """That block, which has the state of fewer tokens, is no hit of its end; the checkpoint is one."""
    manager = make(full(2), states(8, checkpoints=True), retention_interval=None)
    first = request_of("first", list(range(13)))
    compute(manager, first, 8, 12)
    manager.free(first)
    second = request_of("second", [*range(12), *range(40, 60)])
    compute(manager, second, 32)
    begun = manager.get_block_ids("second")[1][1]
    assert not begun or not manager.block_pool.is_hashed[begun]
    for shared, expected in ((31, 30), (20, 12)):
        other = request_of(f"other{shared}", [*second.token_ids[:shared].tolist(), 99, 99])
        assert manager.get_computed_blocks(other)[1] == expected
    plain = make(full(2), states(8), retention_interval=None)
    compute(plain, third := request_of("third", list(range(32))), 4)
    with pytest.raises(ValueError, match="expected a step from 4 computed tokens to end at 8"):
        plain.allocate_slots(third, 28)
