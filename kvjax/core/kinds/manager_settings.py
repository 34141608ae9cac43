"""What the managers of all groups are told, and what a family of kinds makes of it.

Flow:    KVCacheManager -> [ManagerSettings] -> SingleTypeKVCacheManager.table_layout -> [TableLayout]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ManagerSettings:
    """What the managers of all groups have in common."""

    enable_caching: bool
    max_model_len: int
    max_in_flight_tokens: int
    context_parallel_size: int = 1
    same_step_hits: bool = True
    reserve: bool = False
    sub_block_hits: bool = False
    retention_interval: int | str | None = None
    retention_ends: str = "all"
    defer_fresh_hits: bool = False


@dataclass(frozen=True)
class TableLayout:
    """What a family makes of a spec and the settings: how its tables look, and when it registers."""

    block_size: int  # tokens of a column
    num_tail_columns: int  # columns at the end of a row that are never released before the request ends
    enable_caching: bool
    same_step_hits: bool


__all__ = ["ManagerSettings", "TableLayout"]
