"""What the managers of all groups are told, and what a family of kinds makes of it.

Flow:    KVCacheManager -> [ManagerSettings] -> SingleTypeKVCacheManager.table_layout -> [TableLayout]
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.options.manager_options import ManagerOptions


@dataclass(frozen=True, kw_only=True)
class ManagerSettings:
    """What the managers of all groups have in common."""

    max_model_len: int  # most tokens of one request
    hash_block_size: int  # tokens of one `Request.block_hashes` entry; divides every group's block size
    options: ManagerOptions

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens that steps in flight add to one request."""
        in_flight = self.options.max_in_flight_tokens
        return self.max_model_len if in_flight is None else in_flight

    @property
    def context_parallel_size(self) -> int:
        """Ranks that a block is spread over."""
        return self.options.dcp_world_size * self.options.pcp_world_size


@dataclass(frozen=True)
class TableLayout:
    """What a family makes of a spec and the settings: how its tables look, and when it registers."""

    block_size: int  # tokens of a column
    num_tail_columns: int  # columns at the end of a row that are never released before the request ends
    enable_caching: bool
    same_step_hits: bool


__all__ = ["ManagerSettings", "TableLayout"]
