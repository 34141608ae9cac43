"""Bytes of a request's KV that travel between replicas, by the sizes of the cache's own pages.

Flow:    KVCacheManager's block tables of a request -> [kv_bytes] -> Channel
Source:  what kvjax.transfer sends: entries of tokens that have a block, a recurrent state once
"""

from __future__ import annotations

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.tiers.units import UnitSizes


def kv_bytes(manager: KVCacheManager, sizes: UnitSizes, row: int, first: int, stop: int) -> int:
    """Bytes of tokens `first` to `stop - 1` of the request in `row`, on one device.

    Of a block as large a part as its tokens are of all that it holds. Pages that a window has released are none.
    """
    total = 0
    for group_id, group in enumerate(manager.kv_cache_config.kv_cache_groups):
        unit_bytes = sizes.unit_bytes(group_id)
        if group.kv_cache_spec.state_pages is not None:
            total += unit_bytes
            continue
        block_size = manager.block_size(group_id)
        blocks = np.arange(first // block_size, -(-stop // block_size))
        tokens = np.minimum((blocks + 1) * block_size, stop) - np.maximum(blocks * block_size, first)
        has_page = manager.block_tables(group_id)[row, blocks] > 0
        total += int(tokens[has_page].sum()) * unit_bytes // block_size
    return total


__all__ = ["kv_bytes"]
