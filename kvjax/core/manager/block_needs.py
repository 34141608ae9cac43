"""How many blocks of each pool a request takes: what admission, forks, pins and steps compare with what is free.

Flow:    counts of tokens, hits -> [BlockNeeds] -> blocks per pool -> fits, or not
Source:  get_num_blocks_to_allocate of vLLM v1/core/kv_cache_coordinator.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import le

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.slabs.slab_memory import SlabMemory
from kvjax.core.spec import NEVER


class BlockNeeds:
    """Asks the managers of all groups. Changes nothing; a call costs about a microsecond per manager."""

    def __init__(self, groups: GroupManagers, slabs: SlabMemory | None = None) -> None:
        self._groups = groups
        self._slabs = slabs
        self._pools = groups.pools
        self._managers = tuple(zip(groups.managers, groups.pool_ids, strict=True))  # each with the number of its pool

    def of_new(
        self,
        num_slots: int,
        hits: Sequence[np.ndarray],
        total_computed: int,
        capped: bool,
        num_encoder_tokens: int = 0,
        num_tokens: int = NEVER,
        num_prompt_tokens: int = NEVER,
    ) -> list[int]:
        """Per pool the free blocks that a first allocation takes; `hits` are int32[k] per group.

        `num_tokens` are the slots without lookahead, and the prompt's tokens count where `capped`.
        """
        needs = [0] * len(self._pools)
        for (manager, pool_id), ids in zip(self._managers, self._groups.by_manager(hits), strict=True):
            slots = min(num_slots, num_tokens) if manager.holds_states else num_slots
            if capped and manager.prompt_columns is not None:
                slots = min(slots, manager.prompt_columns.most_slots(num_prompt_tokens))
            slots = manager.slots_of(slots, num_encoder_tokens)
            needs[pool_id] += manager.num_blocks_for_new(slots, ids, total_computed, capped)
        return needs

    def of_running(self, row: int, num_slots: int, capped: bool = False, num_tokens: int = NEVER) -> list[int]:
        """Per pool the free blocks that a row still needs; `num_tokens` are the slots without lookahead."""
        needs = [0] * len(self._pools)
        for manager, pool_id in self._managers:
            slots = min(num_slots, num_tokens) if manager.holds_states else num_slots
            if capped and manager.prompt_columns is not None:
                slots = min(slots, manager.prompt_columns.most_slots_of(row))
            needs[pool_id] += manager.num_blocks_for_running(row, slots, capped)
        return needs

    def of_children(self, num_rows: int) -> list[int]:
        """Per pool the free blocks that so many new rows take when they share what another row holds."""
        needs = [0] * len(self._pools)
        for manager, pool_id in self._managers:
            needs[pool_id] += manager.num_blocks_for_share(num_rows)
        return needs

    def worst_case(self, num_slots: int) -> list[int]:
        """Per pool the most blocks that a request of at most `num_slots` slots ever holds at once."""
        needs = [0] * len(self._pools)
        for manager, pool_id in self._managers:
            needs[pool_id] += manager.worst_case_blocks(num_slots)
        return needs

    def fit(self, needs: Sequence[int], hits: Sequence[np.ndarray] | None = None) -> bool:
        """Whether every pool has the blocks free, those of `hits` among them: int32[k] per group."""
        if self._slabs is None:
            return all(map(le, needs, [pool.num_free_blocks for pool in self._pools]))
        return self._slabs.fit(needs, None if hits is None else partial(self._groups.by_pool, hits))


def sums(needs: Sequence[int], more: Sequence[int]) -> list[int]:
    """Per pool both together."""
    return [need + other for need, other in zip(needs, more, strict=True)]


__all__ = ["BlockNeeds", "sums"]
