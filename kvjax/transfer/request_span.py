"""What of a request is sent: its tokens from one position to another, and per group the entries and pages of these.

Flow:    manager's block tables of a request -> [RequestPages] -> entries of each layer
Source:  ARCHITECTURE.md, "DeepSeek V4": an entry may stand for several tokens

A recurrent state is one entry, after the last token; its page is the one column of its group's table here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvjax.device import Placement


class RequestTables(Protocol):
    """What is read of a `KVCacheManager`."""

    kv_cache_config: KVCacheConfig

    def block_tables(self, group_id: int) -> np.ndarray:
        """int32[rows, columns] of all requests."""

    def num_blocks(self, group_id: int) -> np.ndarray:
        """int64[rows] columns in use."""


@dataclass(frozen=True)
class RequestPages:
    """Block tables of one request, and its tokens `first` to `stop - 1` that are sent or received."""

    tables: tuple[np.ndarray, ...]  # int32[columns] of each group; of recurrent states int32[1]
    first: int
    stop: int
    rank: int = 0  # data rank whose manager made the tables

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ValueError(f"expected 0 <= first < stop, got tokens {self.first} to {self.stop}")

    def digest(self, request_id: str) -> bytes:
        """What processes compare that are to send or receive the same."""
        found = hashlib.sha256(repr((request_id, self.first, self.stop, self.rank)).encode())
        for table in self.tables:
            found.update(np.ascontiguousarray(table, np.int64).tobytes())
        return found.digest()

    def entries(self, spec: KVCacheSpec) -> tuple[int, int]:
        """First and end of the entries of a layer; of states (0, 1)."""
        if spec.state_pages is not None:
            return 0, 1
        return self.first // spec.tokens_per_state, self.stop // spec.tokens_per_state


def request_pages(manager: RequestTables, row: int, first: int, stop: int, rank: int = 0) -> RequestPages:
    """The tables of the request in `row` of a data rank's manager, whose first `stop` tokens have blocks."""
    groups = enumerate(manager.kv_cache_config.kv_cache_groups)
    return RequestPages(tuple(_table(manager, i, group, row, stop) for i, group in groups), first, stop, rank)


def check_rank(rank: int, placement: Placement) -> None:
    """Raises ValueError unless an engine's data rank is one of the placement that its connector was given."""
    if rank >= placement.num_data:
        raise ValueError(
            f"expected the placement of the engine's pages, got one of {placement.num_data} data ranks; give the "
            "connector placement=Placement.create(mesh)"
        )


def check_tables(kv_cache_config: KVCacheConfig, request: RequestPages, num_ranks: int) -> None:
    """Raises ValueError unless there is a table for each group, of one of so many data ranks."""
    if not 0 <= request.rank < num_ranks:
        raise ValueError(f"expected a data rank below {num_ranks}, got {request.rank}")
    expected = len(kv_cache_config.kv_cache_groups)
    if len(request.tables) != expected:
        raise ValueError(f"expected block tables of {expected} groups, got {len(request.tables)}")


def _table(manager: RequestTables, group_id: int, group: KVCacheGroupSpec, row: int, stop: int) -> np.ndarray:
    table, counts = manager.block_tables(group_id), manager.num_blocks(group_id)
    states = group.kv_cache_spec.state_pages
    if states is None:
        return table[row, : counts[row]].copy()
    rows = np.array([row])
    return states.pages_of_states(table, counts, rows, np.array([stop]))
