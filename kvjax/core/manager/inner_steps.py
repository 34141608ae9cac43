"""What steps and admissions do where hits end inside blocks, or states are kept on a step's way.

Flow:    SlotAllocator, RowBlocks -> [InnerSteps] -> InnerStates, BlockPool.cache_inner
Source:  allocate_slots and cache_blocks of vLLM 0.33 v1/core

Before blocks are counted a step's checkpoint is planned; after full blocks are registered, what ends inside one is: the
checkpoint, else the running state if the step ends where the same prompt can hit, and the prompt's last hash of full
attention. From a row's first step to the one that registers its prompt's end no step of it is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.inner_states import NEW_ROW, InnerStates, Place
from kvjax.core.kinds.recurrent import RecurrentManager
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.requests.request import Request
from kvjax.core.spec import cdiv


class InnerSteps:
    """Over all groups of one manager. Owned by its `RowBlocks`."""

    def __init__(self, groups: GroupManagers) -> None:
        self._groups = groups
        self._unit = groups.hashing.hash_block_size
        self._states = [
            (manager, manager.inner_states)
            for manager in groups.managers
            if isinstance(manager, RecurrentManager) and manager.inner_states is not None
        ]
        self._runs = [
            (manager, drops)
            for manager, drops in groups.cacheable_lookups
            if groups.has_inner_hits and not manager.forgets and manager.block_size > self._unit
        ]
        self._registered: set[int] = set()  # rows whose prompt's end is
        self._shared: dict[int, int] = {}  # by row, tokens

    def plan(self, request: Request, row: int, start: int, end: int) -> None:
        """Plans the checkpoint of a step from `start` to `end` tokens, `NEW_ROW` for a new request's first one."""
        retention = self._groups.retention
        keeps_only_ends = retention is not None and not retention.interval
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        for manager, states in self._states:
            place = states.rule.place(start, end) if end >= prefill_end or not keeps_only_ends else None
            if place is not None and row != NEW_ROW and not _is_free(manager, states, row, place.column):
                place = None
            states.checkpoints.pop(row, None)
            states.passed.pop(row, None)
            if place is not None:
                states.checkpoints[row] = place
                if start % manager.block_size:
                    states.passed[row] = start // manager.block_size + 1

    def begin(self, row: int, num_shared_tokens: int) -> None:
        """A new request has a row; some groups had so many of its tokens cached when it was looked up."""
        self._registered.discard(row)
        self._shared[row] = num_shared_tokens
        for _, states in self._states:
            states.begin(row)

    def leaves_checkpoints(self, start: int, end: int) -> bool:
        """Whether devices leave a checkpoint of every kind in such a step: then it may leave blocks it began inside."""
        return bool(self._states) and all(states.rule.place(start, end) for _, states in self._states)

    def pass_over(self, row: int) -> None:
        """Counts a block that the row's step began inside and left as registered, so that it never is."""
        for manager, states in self._states:
            if (column := states.passed.pop(row, None)) is not None:
                manager.num_cached_blocks[row] = max(manager.num_cached_blocks.item(row), column)

    def is_busy(self, row: int) -> bool:
        """Whether the row's next step has something to do here."""
        return row not in self._registered or any(row in states.tails for _, states in self._states)

    def register(self, request: Request, row: int, num_tokens: int) -> None:
        """Registers what ends inside blocks of the first `num_tokens` tokens, which are known."""
        hashes: Sequence[BlockHash] = request.block_hashes
        for manager, drops in self._runs:
            self._register_run(request, row, hashes, num_tokens, manager, drops)
        for states_manager, states in self._states:
            self._register_states(request, row, hashes, num_tokens, states_manager, states)
        if num_tokens >= request.num_prompt_tokens:
            self._registered.add(row)

    def _register_run(
        self,
        request: Request,
        row: int,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        manager: SingleTypeKVCacheManager,
        drops: bool,
    ) -> None:
        """The prompt's last hash that a hit can end at."""
        limit = request.num_prompt_tokens - (not drops)
        length = min(limit // self._unit, len(hashes)) * self._unit
        column = length // manager.block_size
        if 0 < length <= num_tokens and length % manager.block_size and column < manager.num_blocks[row]:
            blocks = manager.block_tables[:, row, column].tolist()
            for group_id, block_id in zip(manager.group_ids, blocks, strict=True):
                manager.block_pool.cache_inner(request, block_id, hashes, length, group_id)

    def _register_states(
        self,
        request: Request,
        row: int,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        manager: RecurrentManager,
        states: InnerStates,
    ) -> None:
        """The checkpoint of the step, or the running state."""
        rule, place = states.rule, states.checkpoints.get(row)
        if place is not None:
            if not self._is_kept(request, row, place, states):
                manager.block_pool.evict_blocks(manager.block_tables[:, row, place.column])
            elif manager.num_tokens_of(row, place.column) != place.num_tokens:
                manager.register_state(request, row, hashes, place, replaces=True)
            return
        if not self._groups.has_inner_hits:  # what a hit of whole blocks can use, and with EAGLE a block more
            whole = num_tokens // rule.unit * rule.unit
            num_tokens = min(num_tokens, whole + rule.block_size * rule.drops_unit) if whole else 0
        is_tail = num_tokens == rule.last_length(request.num_prompt_tokens, self._unit)
        if states.keeps_shared:
            is_new = request.num_computed_tokens < num_tokens <= request.num_prompt_tokens
            is_tail |= is_new and num_tokens == self._shared.get(row)
        if not states.has_tails or not num_tokens or not is_tail:
            return
        place = Place(num_tokens, cdiv(num_tokens, rule.block_size) - 1)
        is_held = place.column < manager.num_blocks[row] and manager.block_tables[0, row, place.column] != 0
        if is_held and manager.num_tokens_of(row, place.column) != num_tokens:
            manager.register_state(request, row, hashes, place)
            if num_tokens % rule.block_size:
                states.note_tail(row, place)
                manager.num_cached_blocks[row] = place.column

    def _is_kept(self, request: Request, row: int, place: Place, states: InnerStates) -> bool:
        """Whether a later request can resume at a checkpoint: the prompt's end, a kept length, or a shared prefix."""
        retention, rule = self._groups.retention, states.rule
        if place.num_tokens == rule.last_length(request.num_prompt_tokens, rule.unit):
            return True
        if place.num_tokens % rule.block_size == 0:
            if retention is None:
                return True
            if retention.interval and place.num_tokens % retention.interval == 0:
                return True
        return place.num_tokens == self._shared.get(row)


def _is_free(manager: RecurrentManager, states: InnerStates, row: int, column: int) -> bool:
    """Whether a row has no state in a column, or one of drafts that moves on."""
    num_blocks = manager.num_blocks.item(row)
    if column >= num_blocks or not manager.block_tables[0, row, column]:
        return True
    return row in states.started and column >= num_blocks - manager.kv_cache_spec.num_speculative_blocks


__all__ = ["InnerSteps"]
