"""Slots for one request: what `KVCacheManager.allocate_slots` does once its quick answer does not hold.

Flow:    KVCacheManager.allocate_slots -> [SlotAllocator] -> RowBlocks -> per group int32[k] new block ids
Source:  order of work of vLLM v1/core/kv_cache_manager.py (allocate_slots)

    1  check every argument                        nothing is changed by a call that raises
    2  release what left the windows               also if the call is refused
    3  compare needs with what is free             refused: None
    4  hold the hits of all groups, then take blocks for external tokens, then new blocks
    5  register the blocks that the step fills
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.core.eviction import EvictionPolicy
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.inner_states import NEW_ROW
from kvjax.core.manager.block_needs import BlockNeeds, sums
from kvjax.core.manager.inner_block_hits import InnerBlockHits
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.manager.step_limit import limit_step
from kvjax.core.manager.sub_block_hits import PartialBlocks, SubBlockHits
from kvjax.core.pool.kv_cache_blocks import FoundHit, KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import cdiv
from kvjax.core.tables.token_counts import MOST_TOKENS, as_count
from kvjax.errors import BlockStateError

GroupIds = tuple[np.ndarray, ...]  # per group int32[k]


@dataclass
class SlotCounts:
    """Numbers of tokens of one call. Nobody writes to it; not frozen, since every admission makes one."""

    new: int
    new_computed: int
    lookahead: int
    external: int
    encoder: int
    in_flight: int
    kept_free: int = 0  # blocks

    def as_ints(self) -> SlotCounts:
        """The counts as ints.

        Raises:
            ValueError: one can not be.
        """
        counts = self if self._are_counts() else SlotCounts(*map(as_count, _PARAMETERS, vars(self).values()))
        if not (counts.new or counts.external or counts.new_computed):
            raise ValueError("expected num_new_tokens >= 1, got 0; only a hit or a load of tokens computes nothing")
        return counts

    def _are_counts(self) -> bool:
        """Whether all are ints in range, told by the bits of all: negative if one is, an int if they are."""
        try:
            bits = self.new | self.new_computed | self.lookahead | self.external | self.encoder | self.in_flight
            bits |= self.kept_free
        except TypeError:
            return False
        return type(bits) is int and 0 <= bits < MOST_TOKENS


_PARAMETERS = (
    "num_new_tokens",
    "num_new_computed_tokens",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "num_encoder_tokens",
    "num_in_flight_tokens",
    "num_kept_free",
)


class SlotAllocator:
    """Allocates over all groups and one request table. Owned by one `KVCacheManager`."""

    def __init__(
        self,
        groups: GroupManagers,
        needs: BlockNeeds,
        rows: RowBlocks,
        request_table: RequestTable,
        reservations: Reservations | None,
        sub_block_hits: SubBlockHits | InnerBlockHits | None,
    ) -> None:
        self._groups = groups
        self._needs = needs
        self._rows = rows
        self._table = request_table
        self._reservations = reservations
        self._sub_block_hits = sub_block_hits
        self._enable_caching = groups.options.enable_caching
        self._defers_fresh_hits = groups.options.rules.defer_fresh_hits
        self._max_model_len = groups.settings.max_model_len
        self._state_steps = groups.state_steps if groups.state_steps else None
        policies = [pool.eviction_policy for pool in groups.pools]
        self._told_policies = [p for p in policies if type(p).note_admission is not EvictionPolicy.note_admission]
        self._has_prompt_columns = any(manager.prompt_columns is not None for manager in groups.managers)
        self._no_needs = [0] * len(groups.pools)  # per pool
        self._no_partial_blocks = PartialBlocks((), tuple(self._no_needs), tuple(self._no_needs))
        self._max_encoder_tokens = min(manager.max_encoder_tokens for manager in groups.managers)

    def allocate(
        self, request: Request, counts: SlotCounts, hit: KVCacheBlocks | None, delay_caching: bool, must_fit: bool
    ) -> GroupIds | None:
        """Any request, any counts.

        Raises:
            ValueError, BlockStateError: as `KVCacheManager.allocate_slots`. Nothing is changed.
        """
        hit = self._groups.no_blocks if hit is None else hit
        if request.row < 0:
            return self._allocate_new(request, counts, hit, delay_caching, must_fit)
        row = self._own_row(request)
        if counts.new_computed or counts.external or hit.num_blocks:
            raise ValueError(f"request {request.request_id!r} is running; only a new request comes with a hit")
        if counts.encoder and self._groups.reads_encoder:
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
        limit = self._max_model_len
        if after > limit:
            self._check_length(request, after)
        self._check_step_end(computed, after)
        for manager in self._groups.rings:
            manager.check_rings(np.array([row]), np.array([computed]), np.array([after]))
        settled = max(computed - in_flight, 0)
        num_slots = min(after + lookahead, limit)
        if self._reservations is not None:
            self._reservations.check_row(row, num_slots, settled)
        cacheable = 0 if delay_caching else self._rows.cacheable_tokens(request, row, after)
        return self._rows.extend(request, row, settled, num_slots, cacheable, after)

    def _check_step_end(self, start: int, after: int) -> None:
        if self._state_steps is None:
            return
        inner = self._rows.inner
        if inner is None or not inner.leaves_checkpoints(start, after):
            self._state_steps.check_step_ends(start, after)

    def limit_step(self, request: Request, new: int, new_computed: int, hit: KVCacheBlocks | None) -> int:
        """`KVCacheManager.limit_step`."""
        new = as_count("num_new_tokens", new)
        computed = request.num_computed_tokens + as_count("num_new_computed_tokens", new_computed)
        lengths: tuple[int, ...] = ()
        retention = self._groups.retention
        if retention is not None and request.row >= 0:
            lengths = retention.lengths_of(request.row)
        elif retention is not None:
            own = retention.num_own_tokens(request.num_prompt_tokens, request.num_tokens)
            lengths = retention.lengths_for(own, 0 if hit is None else hit.num_shared_tokens, request.checkpoints)
        return limit_step(self._groups, computed, new, request.num_tokens, lengths)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """`KVCacheManager.cache_blocks`."""
        row = self._rows.row_of(request)
        num_computed_tokens = as_count("num_computed_tokens", num_computed_tokens)
        if not self._enable_caching or self._table.skips_registration[row]:
            return
        for manager in self._groups.cacheable:
            slots = manager.held_slots(row)
            if num_computed_tokens > slots:
                raise ValueError(f"expected num_computed_tokens in [0, {slots}], got {num_computed_tokens}")
        num_cacheable = self._rows.cacheable_tokens(request, row, num_computed_tokens)
        self._rows.register(request, row, num_cacheable, num_computed_tokens)
        self._rows.note_idle(row)

    def leave_unregistered(self, request: Request, group_id: int, num_tokens: int) -> None:
        """`KVCacheManager.leave_unregistered`."""
        row = self._rows.row_of(request)
        if not 0 <= group_id < self._groups.num_groups:
            raise ValueError(f"expected group_id in [0, {self._groups.num_groups}), got {group_id}")
        manager, _ = self._groups.place_of_group(group_id)
        columns = cdiv(as_count("num_tokens", num_tokens), manager.block_size)
        if columns > manager.num_blocks[row]:
            slots = manager.held_slots(row)
            raise ValueError(f"group {group_id}: expected num_tokens in [0, {slots}], got {num_tokens}")
        manager.num_cached_blocks[row] = max(manager.num_cached_blocks.item(row), columns)
        self._rows.num_left_out[row] = max(self._rows.num_left_out.item(row), num_tokens)
        self._rows.note_idle(row)

    def can_admit(
        self,
        request: Request,
        num_hit_tokens: int,
        hit: KVCacheBlocks | None,
        kept_free: int | Sequence[int],
        num_encoder_tokens: int,
    ) -> bool:
        """`KVCacheManager.can_admit`."""
        num_pools = len(self._groups.pools)
        by_pool = kept_free if isinstance(kept_free, Sequence) else [kept_free] * num_pools
        kept = [as_count("kept_free", num_blocks) for num_blocks in by_pool]
        if len(kept) != num_pools:
            raise ValueError(f"expected kept_free of {num_pools} pools or one number, got {kept_free}")
        num_hit_tokens = as_count("num_hit_tokens", num_hit_tokens)
        ids = self._groups.no_ids if hit is None else hit.block_ids
        num_encoder_tokens = as_count("num_encoder_tokens", num_encoder_tokens)
        self._plan_new(request, num_hit_tokens, request.num_tokens)
        prompt = request.num_prompt_tokens
        needs = self._needs.of_new(
            request.num_tokens, ids, num_hit_tokens, True, num_encoder_tokens, num_prompt_tokens=prompt
        )
        if isinstance(self._sub_block_hits, InnerBlockHits):
            needs = sums(needs, self._sub_block_hits.partial_blocks(ids, num_hit_tokens, num_hit_tokens).num_held)
        return self._needs.fit(sums(needs, kept), ids)

    def _plan_new(self, request: Request, start: int, end: int) -> None:
        """Plans what the first step of a new request leaves inside blocks."""
        if self._rows.inner is not None:
            self._rows.inner.plan(request, NEW_ROW, start, end)

    def _whole_fits(self, request: Request, row: int, counts: SlotCounts) -> bool:
        """Releases what left the windows of a running row, and says whether the rest of its sequence fits."""
        computed = self._table.num_computed_tokens.item(row)
        self._check_length(request, computed + counts.new)
        self._rows.remove_skipped(row, max(computed - counts.in_flight, 0))
        whole = min(max(request.num_tokens, computed + counts.new), self._max_model_len)
        if self._rows.inner is not None:
            self._rows.inner.plan(request, row, computed, whole)
        needs = self._needs.of_running(row, whole, capped=True)
        if self._rows.copy_on_write.is_marked(row):
            needs = sums(needs, self._rows.copy_on_write.num_copies(row, computed))
        return self._needs.fit(needs)

    def _allocate_new(
        self, request: Request, counts: SlotCounts, hit: KVCacheBlocks, delay_caching: bool, must_fit: bool
    ) -> GroupIds | None:
        total_computed = counts.new_computed + counts.external
        after = total_computed + counts.new
        self._check_new(request, after)
        self._check_step_end(total_computed, after)
        if hit is not self._groups.no_blocks or counts.new_computed:
            if self._defers_fresh_hits and self._groups.are_fresh(hit.block_ids):
                return None
            self._check_hit(request, hit, counts.new_computed, total_computed)
        if counts.encoder:
            self._check_encoder_tokens(counts.encoder)
        num_slots = min(after + counts.lookahead, self._max_model_len)
        reserved_slots, reserved_blocks = 0, self._no_needs
        if self._reservations is not None:
            self._reservations.check_step(num_slots, total_computed)
            reserved_slots = self._final_slots(request, after, counts.lookahead)
            reserved_blocks = self._needs.worst_case(reserved_slots)
            if not self._reservations.admits(reserved_blocks):
                return None
        partial = self._no_partial_blocks
        if self._sub_block_hits is not None:
            partial = self._sub_block_hits.partial_blocks(hit.block_ids, counts.new_computed, total_computed)
        if must_fit:
            whole = min(max(request.num_tokens, after), self._max_model_len)
            self._plan_new(request, total_computed, whole)
            prompt = request.num_prompt_tokens
            needs = self._needs.of_new(
                whole, hit.block_ids, total_computed, True, counts.encoder, num_prompt_tokens=prompt
            )
            if not self._needs.fit(sums(needs, partial.num_held), hit.block_ids):
                return None
        self._plan_new(request, total_computed, after)
        needs = self._needs.of_new(num_slots, hit.block_ids, total_computed, False, counts.encoder, after)
        if partial.places:
            needs = sums(needs, partial.num_held)
        if not self._needs.fit(
            sums(needs, [counts.kept_free] * len(needs)) if counts.kept_free else needs, hit.block_ids
        ):
            return None
        copies = not partial.places or (
            self._needs.fit(sums(needs, partial.num_free), hit.block_ids)
            and (self._reservations is None or self._reservations.admits(sums(reserved_blocks, partial.num_free)))
        )
        row = self._table.add(request)
        if row >= self._rows.idle_until.size:
            self._rows.reserve_rows()
        if self._has_prompt_columns:
            self._rows.begin(row, request.num_prompt_tokens)
        if self._rows.inner is not None:
            self._rows.inner.begin(row, hit.num_shared_tokens)
        for policy in self._told_policies:
            policy.note_admission()
        if self._reservations is not None:
            self._reservations.add(row, reserved_slots, reserved_blocks)
        retention = self._groups.retention
        if retention is not None:
            own = retention.num_own_tokens(request.num_prompt_tokens, request.num_tokens)
            retention.note_admission(row, own, hit.num_shared_tokens, request.checkpoints)
        self._rows.num_hit_tokens[row], self._rows.num_left_out[row] = counts.new_computed, 0
        self._table.num_start_tokens[row] = total_computed
        if total_computed:
            self._rows.add_computed(row, hit.block_ids, total_computed, has_external=counts.external > 0)
        if self._sub_block_hits is not None:
            self._sub_block_hits.split(row, partial, copies)
        if counts.encoder:
            self._table.num_encoder_tokens[row] = counts.encoder
        new_ids = self._rows.allocate(row, num_slots, total_computed, counts.encoder, after)
        if counts.external:
            self._rows.note_loaded(row, hit.block_ids, total_computed)
        if not delay_caching:
            self._rows.register(request, row, self._rows.cacheable_tokens(request, row, after), after)
        self._rows.note_idle(row)
        return new_ids

    def _final_slots(self, request: Request, after: int, lookahead: int) -> int:
        """Slots of the request when it has all its tokens."""
        limit = self._max_model_len
        if request.max_tokens is None:
            return limit
        return min(max(request.num_prompt_tokens + request.max_tokens, request.num_tokens, after) + lookahead, limit)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _own_row(self, request: Request) -> int:
        row = request.row
        if row >= self._table.capacity or self._table.requests[row] is not request:
            raise ValueError(f"request {request.request_id!r} runs in another manager; free it there first")
        return row

    def _check_length(self, request: Request, num_tokens: int) -> None:
        limit = self._max_model_len
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

    def _check_encoder_tokens(self, num_encoder_tokens: int) -> None:
        limit = self._max_encoder_tokens
        if num_encoder_tokens > limit:
            raise ValueError(
                f"expected num_encoder_tokens <= {limit} (max_num_encoder_tokens), got {num_encoder_tokens}"
            )

    def _check_hit(self, request: Request, hit: KVCacheBlocks, num_tokens: int, total_computed: int) -> None:
        """Checks that the hit is of these pools, as long as it says, complete where it is read, and still cached."""
        if hit.pools != self._groups.pool_of_group:
            raise ValueError("expected new_computed_blocks of this manager, got blocks of other pools")
        self._check_answer(request, num_tokens)
        if hit.found is not None:
            as_found = FoundHit(request.block_hashes, num_tokens, self._groups.num_losses)
            if hit.found == as_found:  # no block has lost its hash since the lookup
                return
        if num_tokens and not self._groups.cacheable:
            raise ValueError(f"expected no hit, got {num_tokens} computed tokens: no group has a prefix cache")
        sub_block_hits = self._sub_block_hits
        for group_id, ids in enumerate(hit.block_ids):
            manager, _ = self._groups.place_of_group(group_id)
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
            skipped = manager.get_num_skipped_tokens(total_computed) // manager.block_size
            for start, live in ((0, ids[: min(manager.num_kept_columns, skipped)]), (skipped, ids[skipped:])):
                if live.size and not 0 < live.min() <= live.max() < pool.num_blocks:
                    raise ValueError(
                        f"group {group_id}: expected ids in (0, {pool.num_blocks}) inside the window, "
                        f"got {live.tolist()}"
                    )
                if live.size:
                    self._check_contents(request, group_id, live, start, num_tokens)

    def _check_answer(self, request: Request, num_tokens: int) -> None:
        """Checks that other requests computed the tokens of a hit as this one would."""
        window = self._groups.rswa_window
        if window is not None and num_tokens > request.num_prompt_tokens + window:
            raise ValueError(
                f"request {request.request_id!r}: expected a hit of at most {request.num_prompt_tokens} prompt tokens "
                f"and {window} of the answer (rswa_window), got {num_tokens} tokens"
            )

    def _check_contents(self, request: Request, group_id: int, live: np.ndarray, first: int, num_tokens: int) -> None:
        """Checks that int32[k] blocks from column `first` on still hold the request's tokens up to `num_tokens`.

        A block can have been evicted since the lookup, and registered again for other tokens, or for another group.
        """
        manager, _ = self._groups.place_of_group(group_id)
        hashes = self._groups.hashing.of_block_size(request.block_hashes, manager.block_size)
        num_full = min(num_tokens // manager.block_size - first, live.size)
        expected = list(hashes[first : first + num_full])
        if len(expected) < num_full:
            raise ValueError(
                f"group {group_id}: expected a hit of at most the {len(hashes)} blocks that the request has hashes of, "
                f"got {num_tokens} tokens"
            )
        stale = manager.block_pool.prefix_index.first_other(live[:num_full], expected, group_id)
        if stale is None and (num_old := manager.fresh_blocks.cut(live)) < live.size:
            stale = num_old  # registered for the same tokens in this step: they are not computed yet
        if stale is None and num_full < live.size:
            assert self._sub_block_hits is not None  # else hits end where blocks end
            column = first + num_full
            if not self._sub_block_hits.serves(request, group_id, live.item(num_full), column, num_tokens):
                stale = num_full
        if stale is not None:
            raise BlockStateError(
                f"group {group_id}: block {live[stale]} of the hit is no longer cached with these tokens; "
                "look it up again"
            )
