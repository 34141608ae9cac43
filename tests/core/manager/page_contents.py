"""A device in dicts: what each page holds after copies, zeroing and writes, and whether requests read back their own.

What the KV of a token is depends on all tokens up to it, so a slot holds the tuple of those; so does the page of a
recurrent state. A page is a dict from offset to such a tuple; what nobody wrote is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvjax.core import KVCacheManager, Request

Page = dict[int, Any]


@dataclass
class Writes:
    """A request's part of a step: `count` tokens; those past the ones that it has are drafts, the first few of which
    turn out to be right."""

    request: Request
    count: int
    drafts: list[int] = field(default_factory=list)
    num_accepted: int = 0


class PageContents:
    """The pages of one manager's pools."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages: dict[tuple[int, int], Page] = {}  # (pool, block)
        self.num_copies = 0
        self.encoders: set[str] = set()  # requests whose encoder runs with their first step
        self.state_columns: dict[tuple[Request, int], int] = {}  # (request, group) -> of its last state

    def run(self, writes: list[Writes]) -> None:
        """One step: does the manager's page edits, then writes."""
        self.edit()
        for part in writes:
            self.write(part)

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
        tokens = (request.token_ids.tolist() + part.drafts)[:end]
        for group_id, pool_id, manager, ids in self.groups_of(request):
            key = (group_id, request.cache_salt)
            if manager.reads_encoder:
                for block_id in ids if request.request_id in self.encoders else ():
                    self.pages[pool_id, block_id] = {0: (*key, "encoder")}
            elif not manager.has_stable_positions:
                last = end - len(part.drafts) + part.num_accepted
                ends = range(-(-start // manager.block_size) * manager.block_size, last, manager.block_size)
                if start:
                    assert self.state(request, group_id, start) == (*key, tuple(tokens[:start]))
                for n in [n for n in ends if n > start and ids[n // manager.block_size - 1]]:
                    self.pages[pool_id, ids[n // manager.block_size - 1]] = {0: (*key, tuple(tokens[:n]))}
                column = (last - 1) // manager.block_size
                if not ids[column]:  # passed over: the running column has the state
                    column = len(ids) - 1 - manager.kv_cache_spec.num_speculative_blocks
                self.pages[pool_id, ids[column]] = {0: (*key, tuple(tokens[:last]))}
                self.state_columns[request, group_id] = column
            else:
                for position in range(start, end):
                    block_id = ids[position // manager.block_size]
                    if block_id:  # a window may have passed it before it was written
                        slot = (*key, tuple(tokens[: position + 1]))
                        self.page(pool_id, block_id)[position % manager.block_size] = slot
        self.encoders.discard(request.request_id)

    def check(self, request: Request, computed: int) -> None:
        """Every token that the next one attends to is there, and the request's own."""
        tokens = request.token_ids.tolist()
        for group_id, pool_id, manager, ids in self.groups_of(request):
            key = (group_id, request.cache_salt)
            if manager.reads_encoder:
                assert all(self.page(pool_id, block_id) == {0: (*key, "encoder")} for block_id in ids)
            elif not manager.has_stable_positions:
                assert self.state(request, group_id, computed) == (*key, tuple(tokens[:computed]))
            else:
                for position in range(manager.get_num_skipped_tokens(computed), computed):
                    slot = self.page(pool_id, ids[position // manager.block_size]).get(position % manager.block_size)
                    assert slot == (*key, tuple(tokens[: position + 1])), (request, group_id, position)

    def state(self, request: Request, group_id: int, num_tokens: int) -> Any:
        """The recurrent state that the last step left, or that came by a hit or a fork."""
        _, pool_id, manager, ids = self.groups_of(request)[group_id]
        column = self.state_columns.get((request, group_id), (num_tokens - 1) // manager.block_size)
        return self.page(pool_id, ids[column]).get(0)

    def groups_of(self, request: Request) -> list[tuple[int, int, Any, list[int]]]:
        """Per group: its id, pool, manager, and the request's blocks."""
        ids = self.manager.get_block_ids(request.request_id)
        groups = self.manager.kv_cache_config.kv_cache_groups
        place_of = self.manager.groups.place_of_group
        return [(i, group.pool_id, place_of(i)[0], ids[i]) for i, group in enumerate(groups)]
