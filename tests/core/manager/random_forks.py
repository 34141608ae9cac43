"""Random lives of forked requests on a simulated device: every request always reads back its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, Request
from tests.core.manager.manager_lockstep import Setup
from tests.core.manager.naive_manager import MAX_ENCODER
from tests.core.manager.page_contents import PageContents, Writes


@dataclass
class RandomForks:
    """Steps as an engine makes them: running requests, then admissions, one dispatch; forks at any time."""

    setup: Setup
    seed: int
    bulk: bool = True  # plan_step; else allocate_slots row by row
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        sizes = [int(self.rng.integers(6, 60)) for _ in range(self.setup.num_pools)]
        self.manager: KVCacheManager = self.setup.manager(sizes, **self.options)
        self.device = PageContents(self.manager)
        self.hasher = BlockHasher(self.setup.hash_block_size, "xxhash_cbor", seed="0") if self.setup.caching else None
        self.trunk = self.rng.integers(0, 2, self.setup.max_model_len).tolist()
        self.running: list[Request] = []
        self.unsettled: dict[str, Writes] = {}  # request -> its last step, with drafts
        self.has_states = any(group.mamba is not None for group in self.setup.groups)
        self.snapshots: list[Any] = []
        self.num_requests = self.num_forks = 0

    @property
    def most_drafts(self) -> int:
        """As many as every recurrent group keeps states of."""
        return min((group.drafts for group in self.setup.groups if group.mamba is not None), default=3)

    def cut(self, request: Request, count: int, num_hit: int = 0) -> int:
        """Of `count` tokens those that one step may take."""
        if self.options.get("reserve"):
            count = min(count, self.setup.max_in_flight or self.setup.max_model_len)
        return self.setup.cut(request.num_computed_tokens + num_hit, count)

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def step(self) -> None:
        """Settles drafts, plans, dispatches, reads back."""
        self.settle()
        self.manager.new_step_starts()
        planned = self.plan_running()
        if self.rng.random() < 0.3 and not self.has_states:
            self.fork_some()
        if self.rng.random() < 0.6:
            self.admit(planned)
        self.note()
        self.device.run(planned)
        for part in planned:
            part.request.num_computed_tokens += part.count
            if part.drafts:
                self.unsettled[part.request.request_id] = part
        self.check()
        while self.rng.random() < 0.4:
            self.fork_some()
        self.sample_and_end()
        self.check()
        self.note()

    def note(self) -> None:
        self.manager.check_invariants()
        self.snapshots.append(self.manager.snapshot())

    def check(self) -> None:
        for request in self.running:
            known = min(request.num_computed_tokens, request.num_tokens)
            if known and not (self.has_states and request.request_id in self.unsettled):
                self.device.check(request, known)

    def settle(self) -> None:
        """Takes the rejected drafts back, before or after the others become tokens; nothing is copied for it."""
        parts = [self.unsettled[name] for r in self.running if (name := r.request_id) in self.unsettled]
        self.unsettled.clear()
        is_settled_first = self.rng.random() < 0.5
        before = self.tables()
        for settles in (is_settled_first, not is_settled_first):
            if settles and parts:
                rejected = [len(part.drafts) - part.num_accepted for part in parts]
                updates = self.manager.settle_drafts([part.request.row for part in parts], rejected)
                for table, update in zip(before, updates, strict=True):
                    table[update.rows, update.columns] = update.block_ids
            for part in parts if not settles else ():
                part.request.append_output_token_ids(part.drafts[: part.num_accepted] + [self.some(0, 1)])
        assert all((one == two).all() for one, two in zip(before, self.tables(), strict=True))
        self.check()

    def tables(self) -> list[Any]:
        return [self.manager.block_tables(group_id).copy() for group_id in range(len(self.setup.groups))]

    def plan_running(self) -> list[Writes]:
        chosen = [request for request in self.running if self.rng.random() < 0.7]
        parts = []
        for request in chosen:
            left = request.num_tokens - request.num_computed_tokens
            room = 0 if self.options.get("reserve") else max(self.setup.max_model_len - request.num_tokens - 1, 0)
            drafts = self.rng.integers(0, 2, self.some(0, min(self.most_drafts, room))).tolist() if left == 1 else []
            count = left + len(drafts) if drafts else self.cut(request, self.some(1, left))
            parts.append(Writes(request, count, drafts, self.some(0, len(drafts))))
        lookahead = 0 if self.options.get("reserve") else self.some(0, 2)
        while parts:
            num_planned = self.allocate(parts, lookahead)
            if num_planned == len(parts):
                return parts
            self.end(parts.pop().request)  # the last makes room; those planned are planned again, to no effect
            if self.rng.random() < 0.5:
                return parts[:num_planned]
        return parts

    def allocate(self, parts: list[Writes], lookahead: int) -> int:
        counts = [part.count for part in parts]
        if self.bulk:
            result = self.manager.plan_step([p.request.row for p in parts], counts, num_lookahead_tokens=lookahead)
            self.check_updates(parts[: result.num_planned], result.new_blocks)
            return result.num_planned
        for i, part in enumerate(parts):
            if self.manager.allocate_slots(part.request, part.count, num_lookahead_tokens=lookahead) is None:
                refused = self.manager.snapshot()
                assert self.manager.allocate_slots(part.request, part.count, num_lookahead_tokens=lookahead) is None
                assert self.manager.snapshot() == refused
                return i
        return len(parts)

    def check_updates(self, parts: list[Writes], updates: Any) -> None:
        """What the step plan tells is what the tables hold."""
        for group_id, update in enumerate(updates):
            table = self.manager.block_tables(group_id)
            assert (table[update.rows, update.columns] == update.block_ids).all()

    def admit(self, planned: list[Writes]) -> None:
        self.num_requests += 1
        length = self.some(1, self.setup.max_model_len - 4)
        tokens = self.trunk[:length]
        tokens[-self.some(1, 3) :] = [self.some(0, 1)]
        reads_encoder = self.manager.groups.reads_encoder
        salt = f"input {self.some(0, 1)}" if reads_encoder else None
        most = self.some(1, self.setup.max_model_len - len(tokens)) if self.options.get("reserve") else None
        request = Request(f"r{self.num_requests}", tokens, cache_salt=salt, block_hasher=self.hasher, max_tokens=most)
        hit, num_hit = self.manager.get_computed_blocks(request)
        count = self.cut(request, self.some(1, len(tokens) - num_hit), num_hit)
        encoder = self.some(1, MAX_ENCODER) if reads_encoder else 0
        before = self.manager.snapshot()
        if self.manager.allocate_slots(request, count, num_hit, hit, num_encoder_tokens=encoder) is None:
            assert self.manager.snapshot() == before
            return
        self.device.encoders.add(request.request_id)
        request.num_computed_tokens = num_hit
        self.running.append(request)
        planned.append(Writes(request, count))

    def fork_some(self) -> None:
        able = [request for request in self.running if request.num_computed_tokens > 0]
        if not able or len(self.running) > 16:
            return
        parent = able[self.some(0, len(able) - 1)]
        in_flight = len(self.unsettled[parent.request_id].drafts) if parent.request_id in self.unsettled else 0
        if in_flight and self.has_states:
            return
        if not self.has_states and self.rng.random() < 0.2 and self.may_share(parent, in_flight + 1):
            in_flight += 1
        before = self.manager.snapshot()
        free = [pool.num_free_blocks for pool in self.manager.block_pools]
        children = self.manager.fork(parent, self.some(1, 4), num_in_flight_tokens=in_flight)
        if children is None:
            assert self.manager.snapshot() == before
            return
        if not self.most_drafts or not self.has_states:
            assert [pool.num_free_blocks for pool in self.manager.block_pools] == free
        self.running += children
        self.num_forks += len(children)

    def may_share(self, parent: Request, in_flight: int) -> bool:
        """Whether no window has passed on."""
        shared = parent.num_computed_tokens - in_flight
        managers = self.manager.groups.managers
        return shared > 0 and all(
            m.reads_encoder or m.first_live[parent.row] <= m.get_num_skipped_tokens(shared) // m.block_size
            for m in managers
        )

    def sample_and_end(self) -> None:
        for request in list(self.running):
            limit = self.setup.max_model_len
            if request.max_tokens is not None:
                limit = request.num_prompt_tokens + request.max_tokens
            if request.request_id in self.unsettled:
                continue
            if request.num_computed_tokens == request.num_tokens and request.num_tokens < limit:
                request.append_output_token_ids(self.some(0, 1))
            elif request.num_computed_tokens == request.num_tokens or self.rng.random() < 0.1:
                self.end(request)

    def end(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        self.unsettled.pop(request.request_id, None)
