"""Arrays that callers give or get are theirs: whatever is written into them later, the host state is the same.

The oracle is a manager that is called alike, by a caller who writes into nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheManager,
    MRopePositions,
    PageCopies,
    Request,
    SlidingWindowSpec,
    StepDrafts,
    StepPlan,
    StepsInFlight,
    TableUpdate,
    build_step_plan,
)
from kvjax.planning import plan_kv_cache
from tests.spoiled_arrays import GARBAGE, aligned, arrays_of, spoil

BLOCK_SIZE = 4
MAX_LEN = 64
HASHER = BlockHasher(BLOCK_SIZE, seed="given")


class Hook:
    """A tier that keeps what it was told, and in a world that spoils writes into it."""

    def __init__(self, spoils: bool) -> None:
        self.spoils = spoils
        self.kept: list[tuple[np.ndarray, list[int]]] = []

    def before_reuse(self, pool_id: int, block_ids: np.ndarray, block_hashes: Any, group_ids: np.ndarray) -> None:
        self.keep(block_ids, group_ids)

    def after_register(self, pool_id: int, block_ids: np.ndarray, block_hashes: Any, group_id: int) -> None:
        self.keep(block_ids)

    def holds(self, block_hashes: Sequence[Any], group_id: int) -> np.ndarray:
        return np.zeros(len(block_hashes), bool)

    def keep(self, *arrays: np.ndarray) -> None:
        self.kept += [(array, array.tolist()) for array in arrays]
        if self.spoils:
            spoil(arrays)


class World:
    """A manager with steps in flight; a caller that spoils overwrites each array once a call has returned."""

    def __init__(self, seed: int, spoils: bool) -> None:
        self.rng, self.spoils, self.hook = np.random.default_rng(seed), spoils, Hook(spoils)
        sizes: Any = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
        specs = {"full": FullAttentionSpec(**sizes), "window": SlidingWindowSpec(**sizes, sliding_window=8)}
        limits: Any = {"max_model_len": MAX_LEN, "max_in_flight_tokens": 64}
        self.manager = KVCacheManager(
            plan_kv_cache(specs, num_blocks=60, **limits).config,
            MAX_LEN,
            BLOCK_SIZE,
            enable_kv_cache_events=True,
            zero_new_pages=True,
            tier=self.hook,
        )
        self.flights = StepsInFlight(self.manager.request_table)
        self.positions = MRopePositions()
        self.running: list[Request] = []
        self.num_drafts: list[int] = []  # of the step in flight
        self.log: list[Any] = []  # all that the caller can see, as values

    def spoil(self, *values: Any) -> None:
        if self.spoils:
            spoil(*values)

    def tell(self, value: Any) -> None:
        """Notes what a call gave, before it is spoiled."""
        self.log.append([array.tolist() for array in arrays_of(value)])
        self.spoil(value)

    def admit(self, name: str) -> None:
        prompt = aligned(self.rng.integers(0, 3, self.rng.integers(2, 14)), np.int64)
        embeds = aligned(self.rng.integers(0, 2, (prompt.size, 3)), np.float32) if self.rng.random() < 0.3 else None
        request = Request(name, prompt, prompt_embeds=embeds, block_hasher=HASHER)
        self.spoil(prompt, embeds)
        hit, num_hit = self.manager.get_computed_blocks(request)
        self.spoil(hit)
        blocks = self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit if num_hit else None)
        assert blocks is not None
        self.tell((hit, blocks))
        request.num_computed_tokens = num_hit
        self.log += [num_hit, request.event_extra_keys(0, request.num_tokens // BLOCK_SIZE, BLOCK_SIZE)]
        places = aligned(np.tile(np.arange(request.num_tokens), (3, 1)))
        self.positions.set(request.row, places)
        self.spoil(places)
        self.running.append(request)

    def step(self) -> None:
        manager = self.manager
        rows = aligned([request.row for request in self.running], np.int64)
        left = [request.num_tokens - request.num_computed_tokens for request in self.running]
        counts = aligned([self.rng.integers(0, 3) if own == 1 else 0 for own in left], np.int64)
        new, self.num_drafts = aligned(left + counts), counts.tolist()
        result = manager.plan_step(rows, new)
        drafts = StepDrafts(counts, aligned(self.rng.integers(0, 3, (rows.size, 2)), np.int64))
        copies = tuple(PageCopies(aligned(c.sources), aligned(c.destinations)) for c in manager.take_page_copies())
        zeros = tuple(map(aligned, manager.take_pages_to_zero()))
        updates = [TableUpdate(*map(aligned, (u.rows, u.columns, u.block_ids))) for u in result.new_blocks]
        own: dict[str, Any] = {"drafts": drafts, "page_copies": copies, "pages_to_zero": zeros, "new_blocks": updates}
        wants = aligned(np.ones(rows.size, bool))
        plan: StepPlan = build_step_plan(manager, rows, new, wants_logits=wants, mrope=self.positions, **own)
        sampling_rows = aligned(rows)
        self.flights.start(rows, new, sampling_rows)
        self.spoil(rows, new, counts, wants, sampling_rows, *own.values(), result)
        self.tell(plan)

    def end_step(self) -> None:
        manager, read = self.manager, self.flights.read()
        self.log.append(read.tolist())
        rejected = aligned(self.num_drafts, np.int64)
        rows = aligned(read)
        manager.settle_drafts(rows, rejected)
        tokens = aligned(self.rng.integers(0, 3, rows.size), np.int64)
        manager.request_table.append_tokens(rows, tokens)
        self.spoil(rows, tokens, rejected, read)
        if self.rng.random() < 0.3:
            more = aligned(self.rng.integers(0, 3, 2), np.int64)
            self.running[0].append_output_token_ids(more)
            self.spoil(more)

    def leave(self) -> None:
        chosen = self.running.pop(int(self.rng.integers(len(self.running))))
        self.positions.clear(chosen.row)
        self.manager.free(chosen)
        more = aligned(self.rng.integers(0, 3, 3), np.int64)
        chosen.append_output_token_ids(more)
        self.spoil(more)
        self.log.append(chosen.block_hashes)

    def look(self) -> None:
        """Everything that can be read, and what is written into it if that is possible."""
        manager = self.manager
        for request in self.running:
            self.tell((request.token_ids, request.output_token_ids, request.prompt_embeds))
            self.tell(manager.get_blocks(request.request_id))
        for group_id in range(2):
            self.tell((manager.block_tables(group_id)[: len(self.running)], manager.num_blocks(group_id)))
            self.tell([(own.entries[..., :4], own.num_blocks) for own in manager.group_tables()])
        self.log += [manager.snapshot(), manager.take_events(), [told for _, told in self.hook.kept]]
        assert self.spoils or all(array.tolist() == told for array, told in self.hook.kept)
        manager.check_invariants()


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(20, 90))])
def test_a_caller_who_writes_into_all_arrays_sees_what_one_sees_who_does_not(seed: int) -> None:
    """After every call: prompts, embeddings, rows, counts, drafts, positions, page edits, and all that came back."""
    worlds = [World(seed, spoils) for spoils in (False, True)]
    for step in range(12):
        for world in worlds:
            if not world.running or world.rng.random() < 0.5:
                world.admit(f"r{step}")
            world.step()
            world.end_step()
            world.look()
            while world.running and (world.rng.random() < 0.3 or world.manager.usage > 0.5):
                world.leave()
        for own, spoiled in zip(*(world.log for world in worlds), strict=True):
            assert own == spoiled


@pytest.mark.parametrize("seed", range(20))
def test_what_a_lookup_found_can_not_be_changed_before_it_is_admitted(seed: int) -> None:
    """An admission takes it at its word. Tables that are live cannot be written either."""
    rng = np.random.default_rng(seed)
    world = World(seed, spoils=False)
    prompt = rng.integers(0, 3, 13)
    world.admit("a")
    manager, first = world.manager, Request("b", prompt, block_hasher=HASHER)
    manager.allocate_slots(first, 13)
    hit, num_tokens = manager.get_computed_blocks(Request("c", prompt, block_hasher=HASHER))
    assert num_tokens == 12
    live = [first.token_ids, manager.block_tables(0), manager.num_blocks(1)]
    for array in (*hit.block_ids, *live, *(own.entries for own in manager.group_tables())):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = GARBAGE
