"""A device in dicts: what each page holds after copies, zeroing and writes, and whether requests read back their own.

What the KV of a token is depends on all tokens up to it, so a slot holds the tuple of those; so does the page of a
recurrent state. One with a ring holds the tokens up to the last of the ring, and how many its state is of: from any
number between them a request may go on. A page is a dict from offset to such a tuple; what nobody wrote is not in it.
Recurrent states are read from the pages that step plans name and left in those, as the ops do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request, StepDrafts, StepPlan, build_step_plan
from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.core.pool.page_edits import NO_COPIES, NO_PAGES, PageCopies
from kvjax.core.spec import SlabSpec

Page = dict[int, Any]
BASE = 1 << 40  # behind all offsets: of how many tokens the state of a page with a ring is


@dataclass
class Writes:
    """A request's part of a step: `count` tokens; those past the ones that it has are drafts, the first few of which
    turn out to be right."""

    request: Request
    count: int
    drafts: list[int] = field(default_factory=list)
    num_accepted: int = 0


class Pages(dict[tuple[int, int], Any]):
    """Pages by pool and block. Where pools share slabs, whoever writes to one overwrites what the others had there."""

    def __init__(self, slabs: SlabSpec | None) -> None:
        super().__init__()
        self.slabs = slabs
        self.writer: dict[int, int] = {}  # slab -> pool

    def __setitem__(self, key: tuple[int, int], page: Any) -> None:
        self.claim(*key)
        super().__setitem__(key, page)

    def claim(self, pool_id: int, block_id: int) -> None:
        """The pool writes to a block."""
        if self.slabs is None:
            return
        counts = self.slabs.blocks_per_slab
        slab = block_id // counts[pool_id]
        if (other := self.writer.get(slab, pool_id)) != pool_id:
            for lost in range(slab * counts[other], (slab + 1) * counts[other]):
                self.pop((other, lost), None)
        self.writer[slab] = pool_id


class PageContents:
    """The pages of one manager's pools."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages = Pages(manager.kv_cache_config.slabs)
        self.num_copies = self.num_moved = self.num_on_the_way = 0
        self.encoders: set[str] = set()  # requests whose encoder runs with their first step
        pairs = manager.kv_cache_config.idle_groups
        self.idle, self.running_of = dict(pairs), {idle: running for running, idle in pairs}

    def run(self, writes: list[Writes]) -> None:
        """One step: does the manager's page edits, then writes."""
        self.edit()
        if writes:
            self.update_states(self.plan(writes), {part.request.row: part for part in writes})
        for part in writes:
            self.write(part)

    def plan(self, writes: list[Writes]) -> StepPlan:
        """The step's plan, whose token ids are those of the requests and their drafts."""
        drafts = np.zeros((len(writes), 9), np.int32)
        for line, part in zip(drafts, writes, strict=True):
            line[: len(part.drafts)] = part.drafts
        rows, counts = np.array([[part.request.row, part.count] for part in writes]).T
        num_pools = len(self.manager.block_pools)
        plan = build_step_plan(
            self.manager,
            rows,
            counts,
            drafts=StepDrafts(np.array([len(part.drafts) for part in writes]), drafts),
            page_copies=(NO_COPIES,) * num_pools,
            pages_to_zero=(NO_PAGES,) * num_pools,
        )
        for row, start, end in zip(plan.rows, plan.query_start_loc, plan.query_start_loc[1:], strict=False):
            part = next(part for part in writes if part.request.row == row)
            first = part.request.num_computed_tokens
            assert plan.token_ids[start:end].tolist() == self.tokens_of(part)[first : first + part.count]
        return plan

    def tokens_of(self, part: Writes) -> list[int]:
        """What a request has computed after its part of a step, drafts included."""
        return (part.request.token_ids.tolist() + part.drafts)[: part.request.num_computed_tokens + part.count]

    def update_states(self, plan: StepPlan, parts: dict[int, Writes]) -> None:
        """All reads, then all writes, idle states moved around; a page that a request writes is read by no other."""
        for moves in plan.idle_states:
            self.move(moves.idle_pool, moves.running_pool, moves.loads, self.running_of)
        for group_id, group in enumerate(plan.groups):
            if group.state_read is None or group.state_write is None or group_id in self.running_of:
                continue
            writer: dict[int, int] = {}
            values: dict[int, Any] = {}
            columns = group.state_write.reshape(len(plan.rows), -1)
            for row, write in zip(plan.rows.tolist(), columns.tolist(), strict=True):
                tokens, key = self.tokens_of(parts[row]), (group_id, parts[row].request.cache_salt)
                assert write[-1]
                for back, page in enumerate(reversed(write)):
                    if page:
                        assert page not in writer
                        writer[page], values[page] = row, (*key, tuple(tokens[: len(tokens) - back]))
            bases = self.bases(plan, group_id, parts)
            for row, ends, on_way in self.on_the_way(plan, group_id):
                tokens, key = self.tokens_of(parts[row]), (group_id, parts[row].request.cache_salt)
                for end, page in zip(ends, on_way, strict=True):
                    assert page not in writer
                    writer[page] = row
                    values[page] = (*key, tuple(tokens[: parts[row].request.num_computed_tokens + end]))
                    if bases:
                        bases[page] = len(values[page][2])
            for row, page in zip(plan.rows.tolist(), group.state_read.tolist(), strict=True):
                request = parts[row].request
                if start := request.num_computed_tokens:
                    known = tuple(request.token_ids[:start].tolist())
                    assert self.holds(group.pool_id, page, (group_id, request.cache_salt, known))
                    assert writer.get(page, row) == row
            for page, value in values.items():
                self.pages[group.pool_id, page] = {0: value} | ({BASE: bases[page]} if page in bases else {})
        for moves in plan.idle_states:
            self.move(moves.running_pool, moves.idle_pool, moves.stores, self.idle)

    def bases(self, plan: StepPlan, group_id: int, parts: dict[int, Writes]) -> dict[int, int]:
        """Of the pages that a step appends to: of how many tokens their states are after it. None without rings."""
        group, config = plan.groups[group_id], self.manager.kv_cache_config.kv_cache_groups[group_id]
        spec = config.kv_cache_spec
        if not isinstance(spec, RingStateSpec):
            return {}
        assert group.state_read is not None
        assert group.state_write is not None
        bases, on_way = {}, {row for row, ends, _ in self.on_the_way(plan, group_id) if ends}
        for row, read, write in zip(
            plan.rows.tolist(), group.state_read.tolist(), group.state_write.tolist(), strict=True
        ):
            start, count = parts[row].request.num_computed_tokens, parts[row].count
            base = self.page(group.pool_id, read)[BASE] if start else 0
            if count > 1 + spec.num_ring_drafts or row in on_way:
                bases[write] = start + count
            else:
                bases[write] = start if read != write or start + count - base > spec.ring_tokens else base
        return bases

    def holds(self, pool_id: int, page: int, state: tuple[Any, ...]) -> bool:
        """Whether a request whose state that is may go on from a page."""
        found = self.page(pool_id, page)
        if 0 not in found:
            return False
        *key, tokens = found[0]
        length = len(state[-1])
        return (*key, tokens[:length]) == state and found.get(BASE, len(tokens)) <= length

    def on_the_way(self, plan: StepPlan, group_id: int) -> Iterator[tuple[int, list[int], list[int]]]:
        """Rows that leave states inside the step: after how many of its tokens, and in which pages."""
        group = plan.groups[group_id]
        if group.checkpoint_ends is None or group.checkpoint_pages is None:
            return
        for row, num_new, ends, pages in zip(
            plan.rows.tolist(),
            plan.num_new_tokens.tolist(),
            group.checkpoint_ends.tolist(),
            group.checkpoint_pages.tolist(),
            strict=True,
        ):
            count = sum(page > 0 for page in pages)
            self.num_on_the_way += count
            assert sorted({end for end in ends if end}) == ends[:count]
            assert not any(ends[count:] + pages[count:])
            assert all(0 < end < num_new for end in ends[:count])
            yield row, ends[:count], pages[:count]

    def move(self, source_pool: int, destination_pool: int, copies: PageCopies, group_of: dict[int, int]) -> None:
        """States to another pool, where they are those of another group."""
        self.num_moved += copies.sources.size
        assert len(set(copies.destinations.tolist())) == copies.destinations.size
        read = [self.page(source_pool, page)[0] for page in copies.sources.tolist()]
        for page, (group_id, *state) in zip(copies.destinations.tolist(), read, strict=True):
            self.pages[destination_pool, page] = {0: (group_of[group_id], *state)}

    def edit(self) -> None:
        zeros = self.manager.take_pages_to_zero()
        for pool_id, copies in enumerate(self.manager.take_page_copies()):
            sources, destinations = copies.sources.tolist(), copies.destinations.tolist()
            assert len(set(destinations)) == len(destinations)
            assert not set(destinations) & (set(sources) | set(zeros[pool_id].tolist()) | {0})
            read = [dict(self.page(pool_id, source)) for source in sources]
            for destination, page in zip(destinations, read, strict=True):
                self.pages[pool_id, destination] = page
            self.num_copies += len(sources)
            for block_id in zeros[pool_id].tolist():
                self.pages[pool_id, block_id] = {}
        self.manager.check_invariants()

    def page(self, pool_id: int, block_id: int) -> Page:
        return self.pages.setdefault((pool_id, block_id), {})

    def write(self, part: Writes) -> None:
        request, start = part.request, part.request.num_computed_tokens
        end = start + part.count
        tokens = self.tokens_of(part)
        for group_id, pool_id, manager, ids in self.groups_of(request):
            key = (group_id, request.cache_salt)
            if manager.reads_encoder:
                for block_id in ids if request.request_id in self.encoders else ():
                    self.pages[pool_id, block_id] = {0: (*key, "encoder")}
            elif not manager.holds_states:
                for position in range(start, end):
                    block_id = ids[position // manager.block_size]
                    if block_id:  # a window may have passed it before it was written
                        self.pages.claim(pool_id, block_id)
                        slot = self.slot(request, group_id, tokens, position)
                        self.page(pool_id, block_id)[position % manager.block_size] = slot
        self.encoders.discard(request.request_id)

    def check(self, request: Request, computed: int) -> None:
        """Every token that the next one attends to is there, and the request's own."""
        tokens = request.token_ids.tolist()
        for group_id, pool_id, manager, ids in self.groups_of(request):
            key = (group_id, request.cache_salt)
            if group_id in self.running_of:
                continue  # between ends of blocks nobody reads them
            if manager.reads_encoder:
                assert all(self.page(pool_id, block_id) == {0: (*key, "encoder")} for block_id in ids)
            elif manager.holds_states:
                if computed == self.manager.request_table.num_start_tokens[request.row]:  # its first step is to load it
                    group_id = self.idle.get(group_id, group_id)
                state = (group_id, request.cache_salt, tuple(tokens[:computed]))
                of_group = self.groups_of(request)[group_id][1]
                assert self.holds(of_group, self.page_of_state(request, group_id, computed), state)
            else:
                window = manager.kv_cache_spec.rswa_window or computed + 1
                for position in range(manager.get_num_skipped_tokens(computed), computed):
                    if request.num_prompt_tokens <= position <= computed - window:
                        continue
                    slot = self.page(pool_id, ids[position // manager.block_size]).get(position % manager.block_size)
                    assert slot == self.slot(request, group_id, tokens, position), (request, group_id, position)

    def slot(self, request: Request, group_id: int, tokens: list[int], position: int) -> tuple[Any, ...]:
        """What is computed of a token: of those before it, and of the prompt's end where R-SWA hides some of them."""
        specs = [group.kv_cache_spec for group in self.manager.kv_cache_config.kv_cache_groups]
        shown = request.num_prompt_tokens + min(spec.rswa_window or len(tokens) for spec in specs)
        prompt = (request.num_prompt_tokens,) if position >= shown else ()
        return (group_id, request.cache_salt, tuple(tokens[: position + 1]), *prompt)

    def state(self, request: Request, group_id: int, num_tokens: int) -> Any:
        """The recurrent state that the next step of the request reads."""
        pool_id = self.groups_of(request)[group_id][1]
        return self.page(pool_id, self.page_of_state(request, group_id, num_tokens)).get(0)

    def page_of_state(self, request: Request, group_id: int, num_tokens: int) -> int:
        """Where the state after so many tokens is."""
        pages = self.manager.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.state_pages
        assert pages is not None
        tables = (self.manager.block_tables(group_id), self.manager.num_blocks(group_id))
        [page] = pages.pages_of_states(*tables, np.array([request.row]), np.array([num_tokens]))
        return int(page)

    def groups_of(self, request: Request) -> list[tuple[int, int, Any, list[int]]]:
        """Per group: its id, pool, manager, and the request's blocks."""
        ids = self.manager.get_block_ids(request.request_id)
        groups = self.manager.kv_cache_config.kv_cache_groups
        place_of = self.manager.groups.place_of_group
        return [(i, group.pool_id, place_of(i)[0], ids[i]) for i, group in enumerate(groups)]
