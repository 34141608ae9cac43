"""How long a prefix hit is that every group accepts, and its blocks.

Flow:    PrefixHits -> [KVCacheCoordinator] -> SingleTypeKVCacheManager per spec -> blocks per group, tokens
Source:  vLLM v1/core/kv_cache_coordinator.py; fixed point of hits: ARCHITECTURE.md, "Hybrid hits"
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup

# Per group int32[k] ids; the hit's tokens; those that the groups which keep everything have cached, or else the first.
Hit = tuple[tuple[np.ndarray, ...], int, int]


class KVCacheCoordinator(abc.ABC):
    """Lookups over the managers of all groups; subclasses answer them. Holds no state of its own."""

    def __init__(self, groups: GroupManagers) -> None:
        self.groups = groups
        self.managers = groups.managers
        self.hashing = groups.hashing
        self.drops_last_block = groups.drops_last_block  # per manager
        self.alignment = groups.alignment  # tokens of which every hit is a multiple
        self.no_ids = groups.no_ids
        self.needs_last_block = groups.needs_last_block

    @property
    def smallest_reusable_prefix(self) -> int:
        """Tokens of the shortest hit of whole blocks; 0 without prefix caching."""
        return self.alignment if self.groups.options.enable_caching and self.groups.cacheable else 0

    @abc.abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The longest prefix of at most `max_length` tokens that every group can resume from."""


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Prefix caching is off, or no kind has it: every lookup misses. Any number of groups and pools."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """Nothing."""
        return self.no_ids, 0, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its own hit is the answer."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The group's longest hit; any number of whole blocks will do."""
        manager = self.managers[0]
        hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
        drops = self.drops_last_block[0]
        lookup = PrefixLookup(hashes, max_length, manager.block_size, drops, self.needs_last_block)
        hit = manager.find_longest_cache_hit(lookup)
        length = hit.shape[1] * manager.block_size
        return (self.groups.by_group([hit]), length, length) if length else (self.no_ids, 0, 0)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest length that all of them accept, a multiple of every block size.

    Each manager maps a candidate length to the longest hit of its own that is no longer. Managers whose hits are
    prefix-closed are asked once, first: their answer bounds everybody's and is cut at the end. The others are asked
    in turn, again and again, until every one has returned the same length; a single one is asked once. A manager goes
    on from its last answer, so all questions together look each block of each group up once at most.
    """

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The greatest common hit of all groups."""
        length, num_hashed = max_length, len(block_hashes) * self.hashing.hash_block_size
        scans: dict[int, HitScan] = {}
        others = []
        for index, manager in enumerate(self.managers):
            if not manager.is_prefix_cacheable:
                continue
            hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
            drops = self.drops_last_block[index]
            lookup = PrefixLookup(hashes, max_length, self.alignment, drops, self.needs_last_block)
            scans[index] = manager.start_scan(lookup)
            if manager.forgets:
                others.append(index)

        def ask(index: int, length: int) -> int:
            """The manager's longest hit of at most `length` tokens; one that drops a block may look a block further."""
            drops, manager = self.drops_last_block[index], self.managers[index]
            limit = self.groups.lookup_limit(manager, length, max_length, num_hashed) if drops else length
            return scans[index].longest(limit)

        for index in scans:
            if index not in others:
                length = ask(index, length)
        if len(others) == len(scans):
            length = ask(others[0], length)
        shared = length
        length = agreed_length(ask, others, length)
        if not length:
            return self.no_ids, 0, shared
        hits = [
            scans[index].ids()[:, : length // manager.block_size] if index in scans else manager.no_blocks
            for index, manager in enumerate(self.managers)
        ]
        return self.groups.by_group(hits), length, shared


def agreed_length(ask: Callable[[int, int], int], indices: Sequence[int], length: int) -> int:
    """The most tokens, up to `length`, that every index hits: `ask(index, length)` says how many of so many it does."""
    agreed = turn = 0
    while agreed < len(indices):
        shorter = ask(indices[turn % len(indices)], length)
        agreed = agreed + 1 if shorter == length else 1
        length = shorter
        turn += 1
    return length


def get_kv_cache_coordinator(groups: GroupManagers) -> KVCacheCoordinator:
    """The coordinator of a deployment whose hits end where blocks end: without caching, of one group, or of several."""
    if not groups.options.enable_caching or not groups.cacheable:
        return KVCacheCoordinatorNoPrefixCache(groups)
    if groups.num_groups == 1:
        return UnitaryKVCacheCoordinator(groups)
    return HybridKVCacheCoordinator(groups)
