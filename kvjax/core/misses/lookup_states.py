"""What each group has, had and never had of a prompt's blocks, and how long a hit would be if it still had them.

Flow:    GroupManagers, Request -> [LookupStates] -> MissReasons

Each block of each group that a hit may need is at a level, the lowest that applies:

    CACHED              a lookup finds it
    FRESH               cached in this step, found from the next one on
    CHECKPOINT_EVICTED  was cached, and its block got other contents; of a kind that forgets
    EVICTED             likewise, of a kind that keeps every token
    INVALIDATED         was cached, and was dropped on request
    ELSEWHERE           the same tokens are cached under another salt, adapter or weight version
    UNKNOWN             none of these

A length needs the highest level of all blocks that its hit needs, in all groups. So `longest(CACHED)` is the hit, and
`longest(EVICTED)` the hit if nothing had been evicted.

Kinds that forget (windows, chunks, states) cache few of the blocks that they compute. What was computed is told by the
groups that keep every token, or by `ComputedBlocks` where there are none. `longest_computed(EVICTED)` is the hit if
nothing computed had been left out either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.requests.request import Request
from kvjax.core.watch.evicted_blocks import EvictedBlock

CACHED, FRESH, CHECKPOINT_EVICTED, EVICTED, INVALIDATED, ELSEWHERE, UNKNOWN = range(7)
NO_NUMBER = 1 << 62  # later than every eviction


@dataclass(frozen=True)
class _GroupStates:
    """One group's blocks, and what each length of a hit needs of them."""

    manager: SingleTypeKVCacheManager
    group_id: int
    levels: np.ndarray  # int8[columns]
    evicted_as: np.ndarray  # int64[columns] numbers in the pool's EvictedBlocks
    first_columns: np.ndarray  # int64[lengths] a hit of each length needs the columns from here
    end_columns: np.ndarray  # int64[lengths] to before here

    def needed_levels(self) -> np.ndarray:  # int8[lengths]
        """The highest level among the columns that each length needs."""
        needed = np.zeros(len(self.end_columns), np.int8)
        for level in sorted(set(self.levels.tolist())):
            before = np.concatenate(([0], np.cumsum(self.levels == level)))
            is_needed = before[self.end_columns] > before[self.first_columns]
            if self.manager.num_kept_columns:
                is_needed |= before[np.minimum(self.manager.num_kept_columns, self.end_columns)] > 0
            needed[is_needed] = level
        return needed

    def levels_before(self, num_tokens: np.ndarray) -> np.ndarray:  # int8[n]
        """The highest level among the columns that int64[n] numbers of tokens fill."""
        return np.maximum.accumulate(self.levels)[num_tokens // self.manager.block_size - 1]

    def oldest_eviction(self, place: int) -> EvictedBlock | None:
        """The column that was evicted first among the evicted ones that a length needs."""
        end = self.end_columns[place]
        kept = self.evicted_as[: min(self.manager.num_kept_columns, end)]
        numbers = np.concatenate([kept, self.evicted_as[self.first_columns[place] : end]])
        oldest = int(numbers.min(initial=NO_NUMBER))
        evicted = self.manager.block_pool.prefix_index.evicted
        return None if evicted is None or oldest == NO_NUMBER else evicted.describe(oldest)


def longest_hit(groups: GroupManagers, num_tokens: int) -> int:
    """Most tokens that a request of `num_tokens` can hit, whatever is cached."""
    reach = num_tokens - 1 + groups.may_drop_end
    most = min(reach - drops * manager.block_size for manager, drops in groups.cacheable_lookups)
    most = max(min(most, num_tokens - 1), 0)
    return most - most % groups.alignment


class LookupStates:
    """One prompt's blocks at this moment."""

    def __init__(self, groups: GroupManagers, request: Request, other_origins: Sequence[BlockOrigin]) -> None:
        self._request = request
        self._other_origins = other_origins
        self._hashing = groups.hashing
        self._needs_last_block = groups.needs_last_block
        self._pools = groups.pools
        cacheable = groups.cacheable_lookups
        self._alignment = groups.alignment
        self.max_length = longest_hit(groups, groups.longest_hit(request) + 1)
        self.max_length_with_answer = longest_hit(groups, request.num_tokens)
        self.max_length_without_drops = self._aligned(request.num_tokens - 1)
        self.max_length_without_last_token = self._aligned(request.num_tokens)
        self._lengths = np.arange(self._alignment, self.max_length + 1, self._alignment)
        behind = [manager.block_size * (drops and not manager.holds_states) for manager, drops in cacheable]
        self._num_behind = max(behind)  # tokens behind a hit whose blocks must be cached too
        self._groups: list[_GroupStates] = []
        for (manager, _), num_behind in zip(cacheable, behind, strict=True):
            self._groups += self._states_of(manager, num_behind > 0)
        needed = [group.needed_levels() for group in self._groups]
        self._needed_of_group = {group.group_id: one for group, one in zip(self._groups, needed, strict=True)}
        self._needed = np.max(needed, axis=0)
        self._computed = self._find_computed(groups.cacheable[0])

    def _aligned(self, num_tokens: int) -> int:
        return max(num_tokens - num_tokens % self._alignment, 0)

    def longest(self, level: int) -> int:
        """The longest hit, in tokens, if all blocks up to this level were cached."""
        return self._last_length(self._needed <= level)

    def longest_computed(self, level: int) -> int:
        """Likewise if also all was cached that was computed of tokens up to this level."""
        return max(self.longest(level), self._last_length(self._computed <= level))

    def longest_by_group(self) -> dict[int, int]:
        """By group the longest hit, in tokens, if the others had every block."""
        return {group: self._last_length(needed == CACHED) for group, needed in sorted(self._needed_of_group.items())}

    def oldest_eviction(self, length: int) -> EvictedBlock | None:
        """The block that was evicted first among the evicted ones that a hit of `length` tokens needs."""
        place = length // self._alignment - 1
        found = [group.oldest_eviction(place) for group in self._groups]
        evicted = [block for block in found if block is not None]
        return max(evicted, key=lambda block: (block.seconds_since, block.num_evicted_since), default=None)

    def blocks_short(self, length: int) -> dict[int, int]:
        """By pool how many blocks more would have kept what a hit of `length` tokens needs, if the oldest go first."""
        short: dict[int, int] = {}
        for group in self._groups:
            evicted = group.oldest_eviction(length // self._alignment - 1)
            if evicted is not None:
                pool_id = self._pools.index(group.manager.block_pool)
                short[pool_id] = max(short.get(pool_id, 0), evicted.num_evicted_since + 1)
        return short

    def _last_length(self, possible: np.ndarray) -> int:
        places = np.flatnonzero(possible)
        return self._lengths.item(places[-1]) if len(places) else 0

    def _find_computed(self, first: SingleTypeKVCacheManager) -> np.ndarray:  # int8[lengths]
        """The level of the tokens of each length and of what must be cached behind it, whoever caches them."""
        num_tokens = self._lengths + self._num_behind
        whole = [group.levels_before(num_tokens) for group in self._groups if not group.manager.forgets]
        if whole:
            return np.max(whole, axis=0)
        columns = num_tokens // first.block_size - 1
        levels = np.where(self._are_computed(first, self._request.block_hashes, columns), CACHED, UNKNOWN)
        for others in self._hashes_under_others if (levels == UNKNOWN).any() else ():
            levels[(levels == UNKNOWN) & self._are_computed(first, others, columns)] = ELSEWHERE
        return levels

    def _are_computed(
        self, manager: SingleTypeKVCacheManager, block_hashes: Sequence[BlockHash], columns: np.ndarray
    ) -> np.ndarray:  # bool[n]
        """Whether the manager has lately computed each of int64[n] columns of a request with such hashes."""
        hashes, computed = self._hashing.of_block_size(block_hashes, manager.block_size), manager.computed_blocks
        assert computed is not None  # as `MissReasons.attach` saw to
        return np.array([c < len(hashes) and hashes[c] in computed for c in columns.tolist()], np.bool_)

    def _states_of(self, manager: SingleTypeKVCacheManager, needs_drop: bool) -> list[_GroupStates]:
        """A manager's groups."""
        ends = self._lengths // manager.block_size
        firsts = manager.get_num_skipped_tokens(self._lengths) // manager.block_size
        firsts = np.minimum(firsts, ends - self._needs_last_block)
        num_columns = (self.max_length + self._num_behind) // manager.block_size
        hashes = self._hashing.of_block_size(self._request.block_hashes, manager.block_size)[:num_columns]
        states = []
        for group_id in manager.group_ids:
            levels = np.full(num_columns, UNKNOWN, np.int8)
            evicted_as = np.full(num_columns, NO_NUMBER, np.int64)
            self._fill(manager, group_id, hashes, levels, evicted_as)
            states.append(_GroupStates(manager, group_id, levels, evicted_as, firsts, ends + needs_drop))
        return states

    def _fill(
        self,
        manager: SingleTypeKVCacheManager,
        group_id: int,
        hashes: Sequence[BlockHash],  # of the leading columns, all where the request is hashed
        levels: np.ndarray,  # int8[columns], filled
        evicted_as: np.ndarray,  # int64[columns], filled
    ) -> None:
        index = manager.block_pool.prefix_index
        reused = CHECKPOINT_EVICTED if manager.forgets else EVICTED
        ids = manager.block_pool.find_each(hashes, group_id)
        found = np.flatnonzero(ids >= 0)
        levels[found] = np.where(manager.fresh_blocks.are_fresh(ids[found]), FRESH, CACHED)
        for column in np.flatnonzero(ids < 0).tolist():
            number = None if index.evicted is None else index.evicted.number_of(hashes[column], group_id)
            if number is not None and index.evicted is not None:
                levels[column] = reused if index.evicted.was_reused(number) else INVALIDATED
                evicted_as[column] = number
        unknown = np.flatnonzero(levels == UNKNOWN).tolist()
        for others in self._hashes_under_others if unknown else ():
            other = self._hashing.of_block_size(others, manager.block_size)
            for column in unknown:
                if column < len(other) and other[column] in index.hash_maps[group_id]:
                    levels[column] = ELSEWHERE

    @cached_property
    def _hashes_under_others(self) -> list[list[BlockHash]]:
        return [self._request.block_hashes_under(origin) for origin in self._other_origins]
