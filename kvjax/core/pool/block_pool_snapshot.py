"""The state of a block pool as comparable values.

Flow:    BlockPool.snapshot -> [BlockPoolSnapshot] -> tests, people
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.pool.page_edits import PageEditsSnapshot


@dataclass(frozen=True)
class BlockPoolSnapshot:
    """The state of a pool, comparable: equal snapshots answer every further sequence of calls equally."""

    free_order: tuple[int, ...]
    ref_count: tuple[int, ...]  # by block id
    blocks_by_hash: dict[int, dict[bytes, tuple[int, ...]]]  # group -> hash -> blocks as registered
    page_edits: PageEditsSnapshot
    policy_state: Any = ()  # of the eviction policy, beside the order
    origins: dict[int, BlockOrigin] | None = None  # by hashed block
