"""Slots for one request: what `KVCacheManager.allocate_slots` does once its quick answer does not hold.

Flow:    KVCacheManager.allocate_slots -> [SlotAllocator] -> KVCacheCoordinator -> per group int32[k] new block ids
Source:  order of work of vLLM v1/core/kv_cache_manager.py (allocate_slots)

    1  check every argument                        nothing is changed by a call that raises
    2  give back what left the windows             also if the call is refused
    3  compare needs with what is free             refused: None
    4  hold the hits of all groups, then take blocks for external tokens, then new blocks
    5  register the blocks that the step fills
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.core.manager.coordinator import KVCacheCoordinator
from kvjax.core.manager.sub_block_hits import PartialBlocks
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import cdiv
from kvjax.errors import BlockStateError

GroupIds = tuple[np.ndarray, ...]  # per group int32[k]


@dataclass(frozen=True)
class SlotCounts:
    """Numbers of tokens of one call."""

    new: int
    new_computed: int = 0
    lookahead: int = 0
    external: int = 0
    encoder: int = 0
    in_flight: int = 0

    def check(self) -> None:
        """Raises ValueError for a count that can not be."""
        for name, count in vars(self).items():
            if count < 0:
                raise ValueError(f"expected {_PARAMETERS[name]} >= 0, got {count}")
        if not self.new and not self.external:
            raise ValueError("expected num_new_tokens >= 1, got 0; only a load of external tokens computes nothing")


_PARAMETERS = {
    "new": "num_new_tokens",
    "new_computed": "num_new_computed_tokens",
    "lookahead": "num_lookahead_tokens",
    "external": "num_external_computed_tokens",
    "encoder": "num_encoder_tokens",
    "in_flight": "num_in_flight_tokens",
}


class SlotAllocator:
    """Allocates over one coordinator's groups and one request table. Owned by one `KVCacheManager`."""

    def __init__(self, coordinator: KVCacheCoordinator, request_table: RequestTable, no_blocks: KVCacheBlocks) -> None:
        self._coordinator = coordinator
        self._table = request_table
        self._no_blocks = no_blocks
        self._settings = coordinator.settings
        self._reservations = coordinator.reservations
        none = (0,) * len(coordinator.pools)
        self._no_partial_blocks = PartialBlocks((), none, none)

    def allocate(
        self, request: Request, counts: SlotCounts, hit: KVCacheBlocks | None, delay_caching: bool, must_fit: bool
    ) -> GroupIds | None:
        """Any request, any counts.

        Raises:
            ValueError, BlockStateError: as `KVCacheManager.allocate_slots`. Nothing is changed.
        """
        counts.check()
        hit = self._no_blocks if hit is None else hit
        if request.row < 0:
            return self._allocate_new(request, counts, hit, delay_caching, must_fit)
        row = self._own_row(request)
        if counts.new_computed or counts.external or hit.num_blocks:
            raise ValueError(f"request {request.request_id!r} is running; only a new request comes with a hit")
        if counts.encoder and self._coordinator.reads_encoder:
            raise ValueError(
                f"request {request.request_id!r} is running; expected num_encoder_tokens when it was admitted"
            )
        if must_fit and not self._whole_fits(request, row, counts):
            return None
        return self.extend(request, row, counts.new, counts.lookahead, counts.in_flight, delay_caching)

    def extend(
        self, request: Request, row: int, new: int, lookahead: int, in_flight: int, delay_caching: bool
    ) -> GroupIds | None:
        """A request that runs in `row`; the counts are not negative.

        Raises:
            ValueError: more tokens than `max_model_len`, or a step that recurrent groups can not take. Nothing is
                changed.
        """
        computed = self._table.num_computed_tokens.item(row)
        after = computed + new
        limit = self._settings.max_model_len
        if after > limit:
            self._check_length(request, after)
        if self._coordinator.state_steps:
            self._coordinator.state_steps.check(np.array([computed]), np.array([after]))
        settled = max(computed - in_flight, 0)
        num_slots = min(after + lookahead, limit)
        if self._reservations is not None:
            self._reservations.check_row(row, num_slots, settled)
        cacheable = self._cacheable(row, after, delay_caching)
        return self._coordinator.extend_row(request, row, settled, num_slots, cacheable, after)

    def _whole_fits(self, request: Request, row: int, counts: SlotCounts) -> bool:
        """Gives back what left the windows of a running row, and says whether the rest of its sequence fits."""
        computed = self._table.num_computed_tokens.item(row)
        self._check_length(request, computed + counts.new)
        self._coordinator.remove_skipped_blocks(row, max(computed - counts.in_flight, 0))
        whole = min(max(request.num_tokens, computed + counts.new), self._settings.max_model_len)
        needs = self._coordinator.num_blocks_for_running(row, whole, capped=True)
        if self._coordinator.copy_on_write.is_sharing[row]:
            needs = _sums(needs, self._coordinator.copy_on_write.num_copies(row, computed))
        return self._coordinator.fits(needs)

    def _allocate_new(
        self, request: Request, counts: SlotCounts, hit: KVCacheBlocks, delay_caching: bool, must_fit: bool
    ) -> GroupIds | None:
        coordinator = self._coordinator
        total_computed = counts.new_computed + counts.external
        after = total_computed + counts.new
        self._check_new(request, after)
        if coordinator.state_steps:
            coordinator.state_steps.check(np.array([total_computed]), np.array([after]))
        self._check_hit(hit, counts.new_computed, total_computed)
        coordinator.check_encoder_tokens(counts.encoder)
        num_slots = min(after + counts.lookahead, self._settings.max_model_len)
        reserved_slots, reserved_blocks = 0, [0] * len(coordinator.pools)
        if self._reservations is not None:
            self._reservations.check_step(num_slots, total_computed)
            reserved_slots = self._final_slots(request, after, counts.lookahead)
            reserved_blocks = coordinator.worst_case_blocks(reserved_slots)
            if not self._reservations.admits(reserved_blocks):
                return None
        partial = self._no_partial_blocks
        if coordinator.sub_block_hits is not None:
            partial = coordinator.sub_block_hits.partial_blocks(hit.block_ids, counts.new_computed, total_computed)
        if must_fit:
            whole = min(max(request.num_tokens, after), self._settings.max_model_len)
            needs = coordinator.num_blocks_for_new(whole, hit.block_ids, total_computed, True, counts.encoder)
            if not coordinator.fits(_sums(needs, partial.num_held)):
                return None
        needs = coordinator.num_blocks_for_new(num_slots, hit.block_ids, total_computed, False, counts.encoder, after)
        needs = _sums(needs, partial.num_held)
        if not coordinator.fits(needs):
            return None
        copies = coordinator.fits(_sums(needs, partial.num_free)) and (
            self._reservations is None or self._reservations.admits(_sums(reserved_blocks, partial.num_free))
        )
        row = self._table.add(request)
        coordinator.reserve_rows(self._table.capacity)
        if self._reservations is not None:
            self._reservations.add(row, reserved_slots, reserved_blocks)
        if coordinator.retention is not None:
            coordinator.retention.note_admission(row, request.num_tokens, hit.num_shared_tokens)
        if total_computed:
            coordinator.add_computed_blocks(row, hit.block_ids, total_computed, has_external=counts.external > 0)
        if coordinator.sub_block_hits is not None:
            coordinator.sub_block_hits.split(row, partial, copies)
        self._table.num_encoder_tokens[row] = counts.encoder
        new_ids = coordinator.allocate_new_blocks(row, num_slots, counts.encoder, after)
        coordinator.cache_blocks(request, row, self._cacheable(row, after, delay_caching))
        coordinator.note_quiet(row)
        return new_ids

    def _final_slots(self, request: Request, after: int, lookahead: int) -> int:
        """Slots of the request when it has all its tokens."""
        limit = self._settings.max_model_len
        if request.max_tokens is None:
            return limit
        return min(max(request.num_prompt_tokens + request.max_tokens, request.num_tokens, after) + lookahead, limit)

    def _cacheable(self, row: int, num_tokens: int, delay_caching: bool) -> int:
        """Of the first `num_tokens` tokens those whose blocks may be registered: the request has them, and hashes."""
        if delay_caching or not self._settings.enable_caching or self._table.skips_registration.item(row):
            return 0
        return min(num_tokens, self._table.num_hashed_blocks.item(row) * self._coordinator.hashing.hash_block_size)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _own_row(self, request: Request) -> int:
        row = request.row
        if row >= self._table.capacity or self._table.requests[row] is not request:
            raise ValueError(f"request {request.request_id!r} runs in another manager; free it there first")
        return row

    def _check_length(self, request: Request, num_tokens: int) -> None:
        limit = self._settings.max_model_len
        if num_tokens > limit:
            raise ValueError(
                f"request {request.request_id!r}: expected at most max_model_len = {limit} tokens, got {num_tokens}"
            )

    def _check_new(self, request: Request, after: int) -> None:
        self._check_length(request, max(request.num_tokens, after))
        if request.request_id in self._table:
            raise ValueError(f"another request with the id {request.request_id!r} is running; ids are unique")
        if request.num_computed_tokens:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_computed_tokens} computed tokens but no blocks here; "
                "expected 0: give a hit as num_new_computed_tokens"
            )

    def _check_hit(self, hit: KVCacheBlocks, num_tokens: int, total_computed: int) -> None:
        """Checks that the hit is of these pools, as long as it says, complete where it is read, and still cached."""
        if hit.pools != self._no_blocks.pools:
            raise ValueError("expected new_computed_blocks of this manager, got blocks of other pools")
        if num_tokens and not self._coordinator.has_cacheable_groups:
            raise ValueError(f"expected no hit, got {num_tokens} computed tokens: no group has a prefix cache")
        sub_block_hits = self._coordinator.sub_block_hits
        for group_id, ids in enumerate(hit.block_ids):
            manager, _ = self._coordinator.place_of_group(group_id)
            pool = manager.block_pool
            if not manager.is_prefix_cacheable:
                if ids.size:
                    raise ValueError(f"group {group_id}: expected no hit: its kind has no prefix cache")
                continue
            cut = manager.block_size if sub_block_hits is None else sub_block_hits.granularity
            if ids.size != cdiv(num_tokens, manager.block_size) or num_tokens % cut:
                raise ValueError(
                    f"group {group_id}: expected {num_tokens} computed tokens, a multiple of {cut}, in blocks of "
                    f"{manager.block_size}, got {ids.size} blocks"
                )
            live = ids[manager.get_num_skipped_tokens(total_computed) // manager.block_size :]
            if live.size and not 0 < live.min() <= live.max() < pool.num_blocks:
                raise ValueError(
                    f"group {group_id}: expected ids in (0, {pool.num_blocks}) inside the window, got {live.tolist()}"
                )
            if not pool.is_hashed[live].all():
                stale = live[~pool.is_hashed[live]][0]
                raise BlockStateError(
                    f"group {group_id}: block {stale} of the hit is no longer cached; look it up again"
                )


def _sums(needs: Sequence[int], more: Sequence[int]) -> list[int]:
    return [need + other for need, other in zip(needs, more, strict=True)]
