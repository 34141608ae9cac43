"""How many leading blocks all running requests share: what cascade attention reads once for all of them.

Flow:    SingleTypeKVCacheManager.get_num_common_prefix_blocks -> [count_common_blocks] -> per group
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

import numpy as np


def count_common_blocks(
    tables: np.ndarray,  # int32[G, rows, columns]
    num_blocks: np.ndarray,  # int64[rows]
    ref_count: np.ndarray,  # int32[blocks of the pool]
    row: int,
    num_running_requests: int,
) -> list[int]:
    """Per group the leading blocks of the row that all running rows share.

    Only blocks with at least one reference per request are candidates. Their tables are then compared, since pins and
    copies hold references too.
    """
    running = np.flatnonzero(num_blocks)
    counts = []
    for table in tables:
        ids = table[row, : num_blocks[row]]
        first = _num_leading(ref_count[ids] >= num_running_requests)
        counts.append(_num_leading((table[running, :first] == ids[:first]).all(axis=0)) if first else 0)
    return counts


def _num_leading(flags: np.ndarray) -> int:
    """How many of bool[k] are true before the first that is not."""
    return flags.size if flags.all() else int(flags.argmin())


__all__ = ["count_common_blocks"]
