"""One question to the prefix cache of a kind.

Flow:    KVCacheCoordinator -> [PrefixLookup] -> SingleTypeKVCacheManager.find_longest_cache_hit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvjax.core.hashing.block_hash import BlockHash


class PrefixLookup(NamedTuple):
    """What is looked up. A tuple, since a step makes several."""

    block_hashes: Sequence[BlockHash]  # at the manager's block size
    max_length: int  # tokens; a hit is no longer
    alignment: int  # tokens; a hit's length is a multiple
    drop_last_block: bool  # EAGLE: the block after the hit must be cached too, and is computed again
    needs_last_block: bool = True  # whether the hit's last block must be cached even where the next token sees none
