"""What a manager does with its cached blocks as a whole: forgets some of them, or all.

Flow:    a server's operators, new weights, steps that are dropped -> [PrefixCacheControl] -> pools, request table
Source:  names of vLLM v1/core/kv_cache_manager.py; what else it has is ours
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvjax.core.hashing.extra_keys import LoRARequest
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.invalidation import OriginPredicate, invalidate, origin_filter, stop_registering
from kvjax.core.manager.prefix_hits import PrefixHits
from kvjax.core.manager.slot_allocator import SlotAllocator
from kvjax.core.manager.step_take_back import StepTakeBack
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.slabs.slab_memory import SlabMemory


class PrefixCacheControl:
    """The forgetting half of `KVCacheManager`, over its attributes, without state of its own."""

    groups: GroupManagers
    slabs: SlabMemory | None
    request_table: RequestTable
    _hits: PrefixHits
    _slots: SlotAllocator
    _step_take_back: StepTakeBack

    def evict_blocks(self, block_ids: npt.ArrayLike | Iterable[int], pool_id: int = 0) -> None:
        """Forgets the hashes of blocks, held or free; who holds them stays.

        Raises:
            ValueError: an id or the pool is out of range.
        """
        pools = self.groups.pools
        if not 0 <= pool_id < len(pools):
            raise ValueError(f"expected pool_id in [0, {len(pools)}), got {pool_id}")
        ids = sorted(block_ids) if isinstance(block_ids, set | frozenset) else block_ids
        pools[pool_id].evict_blocks(ids)  # type: ignore[arg-type]

    def invalidate(
        self,
        *,
        cache_salt: str | None = None,
        lora: LoRARequest | str | None = None,
        weight_version: int | str | None = None,
        predicate: OriginPredicate | None = None,
    ) -> int:
        """Forgets what was computed under a salt, an adapter (or all of a name) or a weight version: all that is given.

        Matching blocks are no hits any more; requests that hold them go on, but register no more blocks. Needs
        `track_origins=True`.

        Returns:
            How many blocks ceased to be hits.

        Raises:
            ValueError: no condition is given, or origins are not tracked.
        """
        matches = origin_filter(cache_salt, lora, weight_version, predicate)
        return invalidate(self.groups.pools, self.request_table, matches)

    def stop_registering(self, predicate: OriginPredicate | None = None) -> int:
        """No block that requests running now fill from here on becomes a hit: other weights compute them, for example.

        Args:
            predicate: which requests, by their origin; None: all.

        Returns:
            How many requests that concerns.
        """
        return stop_registering(self.request_table, predicate)

    def leave_unregistered(self, request: Request, group_id: int, num_tokens: int) -> None:
        """No block of a group that has some of a request's first `num_tokens` tokens becomes a hit, if it is none yet.

        For blocks that are right for the request and not whole: of a window, loaded without the tokens that the
        request does not see. Call it after `allocate_slots` with `delay_cache_blocks`; groups of equal spec count
        as one.

        Raises:
            UnknownRequestError: the manager does not hold the request.
            ValueError: there is no such group, or more tokens than its blocks hold.
        """
        self._slots.leave_unregistered(request, group_id, num_tokens)

    def take_back_step(
        self,
        rows: npt.ArrayLike,
        page_copies: Sequence[PageCopies] | None = None,
        pages_to_zero: Sequence[np.ndarray] | None = None,
    ) -> tuple[Request, ...]:
        """Takes back what was planned for rows and is not dispatched: what it was to compute is a hit no more.

        Blocks become hits when a step is planned. So whoever drops a planned step, or some of its requests, calls this
        before anything else is planned, and before a request of it is freed, as by a preemption in the same round.
        `num_computed_tokens` must not have been advanced for the step, or be set back; where external tokens were to be
        loaded in it, to the hit.

        Requests that run keep their blocks and may be planned again. Those that have computed nothing are freed, as
        they were before `allocate_slots`. Who mirrors block tables takes those of the rows anew.

        Args:
            rows: integer[n] distinct rows of running requests.
            page_copies: per pool those of the dropped plan, which wait for the next plan again; None: no plan was
                built, so they wait still.
            pages_to_zero: likewise, int32[Z] per pool.

        Returns:
            The requests that are freed.

        Raises:
            ValueError: a row that no request owns or that comes twice, or page edits of another number of pools.
            BlockStateError: a request that is not taken back has hit a block which the step was to fill. Nothing is
                changed.
        """
        return self._step_take_back.take_back(rows, page_copies, pages_to_zero)

    def gather_slabs(self) -> bool:
        """Where pools share slabs: frees all without a held block, whose hits are lost; whether there was any.

        For a request that does not fit though it is alone: its hit, or blocks that it got, lie in too many slabs.
        """
        return self.slabs is not None and self.slabs.gather()

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes, as new weights demand; False, and nothing changes, while any block is held."""
        pools = self.groups.pools
        if any(pool.num_free_blocks != pool.num_usable_blocks for pool in pools):
            return False
        for pool in pools:
            pool.reset_prefix_cache()
        for index in self.groups.sub_block_indices:
            index.clear()
        self.groups.new_step_starts()
        self._hits.note_reset()
        return True


__all__ = ["PrefixCacheControl"]
