"""How long a hit could be, had windows and recurrent states a checkpoint there.

Flow:    PrefixHits -> [find_shared_prefix] -> KVCacheBlocks.num_shared_tokens -> Retention
Source:  shared_prefix_boundary of vLLM 0.33
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.prefix_lookup import PrefixLookup


def find_shared_prefix(groups: GroupManagers, block_hashes: Sequence[BlockHash], max_length: int) -> int:
    """Tokens of the longest prefix that the groups which keep everything have cached; the first one's, without any.

    A lookup of those groups: at most what a hit costs.
    """
    cacheable = groups.cacheable_lookups
    length = max_length
    for manager, drops in [pair for pair in cacheable if pair[0].hits_are_prefix_closed] or cacheable[:1]:
        limit = min(length + manager.block_size, max_length) if drops else length
        hashes = groups.hashing.of_block_size(block_hashes, manager.block_size)
        hit = manager.find_longest_cache_hit(PrefixLookup(hashes, limit, groups.alignment, drops))
        length = hit.shape[1] * manager.block_size
    return length
