"""Random lives of requests on a simulated device whose new pages are zeroed: their KV is computed or loaded.

A connector writes as soon as it has blocks or as late as it may, while others run; loads fail, and requests that load
are preempted. Steps are dropped after they were planned, or some of their requests are. Requests may verify drafts, and
name checkpoints. Pages keep what was written to them until somebody overwrites or zeroes it, as on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import BlockHasher, Request
from tests.core.manager.manager_lockstep import Setup
from tests.core.manager.page_contents import Page, PageContents, Writes

STEPS = 15  # of a life


@dataclass
class Load:
    """Tokens `first` to `stop - 1` of a request come from outside."""

    request: Request
    first: int
    stop: int
    num_new: int  # tokens that are computed in the step which the load belongs to; 0: no step has it
    num_lacking: int  # first tokens that do not come, where a group does not see them any more
    is_written: bool = False


@dataclass
class RandomLoads:
    """Steps as an engine makes them; every request that runs attends to its own KV alone."""

    setup: Setup
    seed: int
    sub_block_hits: bool = False
    forks: bool = False
    drops: bool = False
    most_drafts: int = 0
    names: bool = False  # checkpoints
    running: list[Request] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    partly_loaded: set[tuple[str, int, int]] = field(default_factory=set)  # request, group, last block of its load
    unsettled: dict[str, Writes] = field(default_factory=dict)  # request -> its last step, with drafts
    started: list[Request] = field(default_factory=list)  # in this step, in order
    requests: list[Request] = field(default_factory=list)  # all that ever were
    num_made: int = 0
    num_loaded: int = 0
    num_dropped: int = 0  # steps, in whole or in part
    num_rejected: int = 0  # drafts

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        sizes = [int(self.rng.integers(20, 60)) for _ in range(self.setup.num_pools)]
        self.manager = self.setup.manager(sizes, zero_new_pages=True, sub_block_hits=self.sub_block_hits)
        self.device = PageContents(self.manager)
        self.hasher = BlockHasher(self.setup.hash_block_size, "xxhash_cbor", seed="0")
        self.trunk = self.rng.integers(0, 2, self.setup.max_model_len).tolist()

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def run(self) -> None:
        """A life of some steps."""
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        self.settle()
        self.manager.new_step_starts()
        self.end_loads()
        parts = self.plan_running()
        self.started = []
        for _ in range(self.some(1, 3)):
            parts += self.admit()
        if self.drops and self.rng.random() < 0.5:
            parts = self.drop(parts)
        self.device.edit()
        for load in self.loads:
            if load.num_new or self.rng.random() < 0.3:
                self.write(load)
        self.device.run(parts)
        for part in parts:
            part.request.num_computed_tokens += part.count
            if part.drafts:
                self.unsettled[part.request.request_id] = part
        self.running += [load.request for load in self.loads if load.num_new]
        self.loads = [load for load in self.loads if not load.num_new]
        self.check()
        self.sample_and_end()
        able = self.settled_requests()
        if self.forks and able and len(self.running) < 8:
            parent = able[self.some(0, len(able) - 1)]
            children = self.manager.fork(parent, 1) or ()
            self.running += children
            self.requests += children

    def settled_requests(self) -> list[Request]:
        return [request for request in self.running if request.request_id not in self.unsettled]

    def settle(self) -> None:
        """Some requests end with drafts in flight; others take rejected ones back, before or after tokens are known."""
        parts = [self.unsettled[name] for r in self.running if (name := r.request_id) in self.unsettled]
        self.unsettled.clear()
        for part in [part for part in parts if self.rng.random() < 0.05]:
            parts.remove(part)
            self.end(part.request)
        is_settled_first = bool(parts) and self.rng.random() < 0.5
        for settles in (is_settled_first, not is_settled_first):
            if settles and parts:
                rejected = [len(part.drafts) - part.num_accepted for part in parts]
                self.manager.settle_drafts([part.request.row for part in parts], rejected)
                self.num_rejected += sum(rejected)
            for part in parts if not settles else ():
                part.request.append_output_token_ids(part.drafts[: part.num_accepted] + [self.some(0, 1)])
        if parts:
            self.check()

    def drop(self, parts: list[Writes]) -> list[Writes]:
        """Those whose part is dispatched: the last that started, and then any of the others, are not."""
        edits: tuple[Any, ...] = ()
        if self.rng.random() < 0.5:  # the plan was built
            edits = self.manager.take_page_copies(), self.manager.take_pages_to_zero()
        num_kept = 0 if self.rng.random() < 0.6 else self.some(0, len(self.started))
        new = self.started[num_kept:]
        for load in reversed([load for load in self.loads if load.request in new]):
            self.loads.remove(load)
            load.request.num_computed_tokens = load.first
            if not load.num_new:
                new.remove(load.request)
                self.give_up(load.request)
        others = [part.request for part in parts if part.request not in self.started and not num_kept]
        others = [request for request in others if self.rng.random() < 0.6]
        freed = self.manager.take_back_step([request.row for request in others + new], *edits)
        assert list(freed) == new
        self.waiting += new
        self.running = [request for request in self.running if request not in new]
        for request in others:
            if self.rng.random() < 0.3:
                self.running.remove(request)
                self.give_up(request)
        self.num_dropped += 1
        return [part for part in parts if part.request not in others + new]

    def end_loads(self) -> None:
        """Some are there, some fail, and some lose their blocks."""
        for load in list(self.loads):
            fate = self.rng.random()
            if fate > 0.6:
                continue
            self.loads.remove(load)
            if fate > 0.2:
                self.write(load)
                self.manager.cache_blocks(load.request, load.stop)
                self.running.append(load.request)
            else:
                self.give_up(load.request)

    def give_up(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def plan_running(self) -> list[Writes]:
        parts = [part for part in map(self.part_of, self.running) if part.count]
        while parts:
            rows, counts = [part.request.row for part in parts], [part.count for part in parts]
            if self.manager.plan_step(rows, counts).num_planned == len(parts):
                return parts
            self.running.remove(parts[-1].request)
            self.give_up(parts.pop().request)
        return parts

    def part_of(self, request: Request) -> Writes:
        """A request's part of the next step: one token and drafts, or some of what it has to compute."""
        left = request.num_tokens - request.num_computed_tokens
        if self.most_drafts and left == 1:
            room = max(self.setup.max_model_len - request.num_tokens - 1, 0)
            drafts = self.rng.integers(0, 2, self.some(0, min(self.most_drafts, room))).tolist()
            return Writes(request, 1 + len(drafts), drafts, self.some(0, len(drafts)))
        return Writes(request, self.cut(request.num_computed_tokens, left))

    def cut(self, computed: int, left: int) -> int:
        return self.setup.cut(computed, self.some(1, left)) if left else 0

    def admit(self) -> list[Writes]:
        if len(self.running) + len(self.loads) > 6:
            return []
        request = self.waiting.pop() if self.waiting else self.new_request()
        hit, num_hit = self.manager.get_computed_blocks(request)
        num_external = self.some(0, request.num_tokens - 1 - num_hit) if self.rng.random() < 0.8 else 0
        if self.setup.idle_groups:  # which have states where blocks end
            num_external -= (num_hit + num_external) % self.manager.groups.alignment
        num_external = max(num_external, 0)
        stop = num_hit + num_external
        waits = num_external > 0 and self.rng.random() < 0.7
        num_new = 0 if waits else self.cut(stop, request.num_tokens - stop)
        if (
            self.manager.allocate_slots(
                request,
                num_new,
                num_hit,
                hit,
                num_external_computed_tokens=num_external,
                delay_cache_blocks=waits,
            )
            is None
        ):
            self.waiting.append(request)
            return []
        request.num_computed_tokens = stop
        self.started.append(request)
        if not num_external:
            self.running.append(request)
            return [Writes(request, num_new)]
        load = Load(request, num_hit, stop, num_new, self.some(0, stop) if waits else 0)
        self.loads.append(load)
        for group_id, _, manager, _ in self.device.groups_of(request):
            if num_lacking := self.num_lacking(load, manager):
                self.manager.leave_unregistered(request, group_id, num_lacking)
        is_copied_to = any(num_hit % group.block_size for group in self.setup.groups)
        if not is_copied_to and self.rng.random() < 0.5:
            self.write(load)
        return [Writes(request, num_new)] if num_new else []

    def new_request(self) -> Request:
        self.num_made += 1
        tokens = self.trunk[: self.some(2, self.setup.max_model_len - 12)]
        tokens += self.rng.integers(0, 2, self.some(0, 8)).tolist()
        named = self.rng.integers(1, len(tokens) + 1, self.some(0, 3)).tolist() if self.names else ()
        self.requests.append(Request(f"r{self.num_made}", tokens, block_hasher=self.hasher, checkpoints=named))
        return self.requests[-1]

    def num_lacking(self, load: Load, manager: Any) -> int:
        """Of one group."""
        num_unseen = 0 if manager.holds_states else manager.get_num_skipped_tokens(load.stop)
        num_lacking = min(load.num_lacking, num_unseen)
        return num_lacking if num_lacking > load.first and not manager.num_kept_columns else 0

    def write(self, load: Load) -> None:
        """What the connector does: each token where it belongs, a state after the last."""
        if load.is_written:
            return
        load.is_written = True
        self.num_loaded += 1
        request = load.request
        request.num_computed_tokens = load.first
        self.device.write(Writes(request, load.stop - load.first))
        request.num_computed_tokens = load.stop
        for group_id, pool_id, manager, ids in self.device.groups_of(request):
            if not manager.holds_states:
                last = ids[(load.stop - 1) // manager.block_size]
                self.partly_loaded.add((request.request_id, group_id, last))
                for position in range(load.first, self.num_lacking(load, manager)):
                    page = self.device.page(pool_id, ids[position // manager.block_size])
                    page.pop(position % manager.block_size, None)
            elif manager.is_prefix_cacheable:
                state = (group_id, request.cache_salt, tuple(request.token_ids[: load.stop].tolist()))
                page = self.device.page_of_state(request, group_id, load.stop)
                self.device.pages[pool_id, page] = {0: state}

    def check(self) -> None:
        for request in self.settled_requests():
            self.device.check(request, request.num_computed_tokens)
        self.check_hits()
        # A copied page has the rest of its source's, another what drafts left.
        if not (self.forks or self.sub_block_hits or self.most_drafts):
            self.check_others()

    def check_hits(self) -> None:
        """Whatever a lookup may hit is written, with the tokens that its hash stands for."""
        hashing = self.manager.groups.hashing
        for pool_id, pool in enumerate(self.manager.snapshot().pools):
            for group_id, by_hash in pool.blocks_by_hash.items():
                manager, _ = self.manager.groups.place_of_group(group_id)
                for request in self.requests:
                    hashes = hashing.of_block_size(request.block_hashes, manager.block_size)
                    for column in range(len(hashes)):
                        for block_id in by_hash.get(hashes[column], ()):
                            self.check_hit(request, group_id, column, self.device.page(pool_id, block_id))

    def check_hit(self, request: Request, group_id: int, column: int, page: Page) -> None:
        """The page has all that its hash stands for."""
        manager, _ = self.manager.groups.place_of_group(group_id)
        start, end = column * manager.block_size, (column + 1) * manager.block_size
        tokens = request.token_ids.tolist()
        if manager.holds_states:
            assert page.get(0) == (group_id, None, tuple(tokens[:end])), (group_id, column)
            return
        for position in range(start, end):
            assert page.get(position - start) == (group_id, None, tuple(tokens[: position + 1])), (group_id, column)

    def check_others(self) -> None:
        """But for the last page of a load, no page holds what its request did not write."""
        for request in self.running:
            tokens = request.token_ids.tolist()
            for group_id, pool_id, manager, ids in self.device.groups_of(request):
                if manager.holds_states:
                    continue
                for column, block_id in enumerate(ids):
                    page = self.device.page(pool_id, block_id) if block_id else {}
                    for place, content in page.items():
                        if place >= manager.block_size:  # of a group with larger blocks in the pool
                            continue
                        position = column * manager.block_size + place
                        is_own = content == self.device.slot(request, group_id, tokens, position)
                        assert is_own or (request.request_id, group_id, block_id) in self.partly_loaded, request

    def sample_and_end(self) -> None:
        for request in self.settled_requests():
            if request.num_computed_tokens < request.num_tokens:
                continue
            if request.num_tokens < self.setup.max_model_len and self.rng.random() < 0.8:
                request.append_output_token_ids(self.some(0, 1))
            else:
                self.end(request)

    def end(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
