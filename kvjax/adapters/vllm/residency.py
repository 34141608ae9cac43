"""Residency metrics of a pool, told to vLLM's collector block by block; it samples and measures for itself.

Flow:    kvjax.core BlockPool -> [ForwardedResidency] -> vLLM's KVCacheMetricsCollector
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector


class BlockId(NamedTuple):
    """What vLLM's collector reads of a block."""

    block_id: int


class ForwardedResidency:
    """One pool's calls, forwarded to a collector."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def attach(self, num_blocks: int) -> ForwardedResidency:
        """The pool asks for its own part: there is one."""
        return self

    def on_blocks_allocated(self, block_ids: np.ndarray) -> None:
        """Tells of new blocks."""
        for block_id in block_ids.tolist():
            self._collector.on_block_allocated(BlockId(block_id))

    def on_blocks_accessed(self, block_ids: np.ndarray) -> None:
        """Tells of prefix hits."""
        for block_id in block_ids.tolist():
            self._collector.on_block_accessed(BlockId(block_id))

    def on_blocks_evicted(self, block_ids: np.ndarray) -> None:
        """Tells of blocks that are reused or lose their hash."""
        for block_id in block_ids.tolist():
            self._collector.on_block_evicted(BlockId(block_id))

    def reset(self) -> None:
        """Tells that the cache was emptied."""
        self._collector.reset()


def forward_residency(collector: Any) -> KVCacheMetricsCollector:
    """vLLM's collector in the place of kvjax's."""
    return cast(KVCacheMetricsCollector, ForwardedResidency(collector))


__all__ = ["forward_residency"]
