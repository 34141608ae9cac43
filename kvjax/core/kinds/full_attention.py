"""Full attention: every token stays visible, so blocks are never released before the request ends.

Source:  vLLM v1/kv_cache_interface.py (FullAttentionSpec), v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.positional import PositionalManager
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.kinds.single_type_manager import NEVER, IntOrArray
from kvjax.core.spec import AttentionSpec, cdiv


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """K and V of every token. `sliding_window` or `attention_chunk_size` is the mask of a promoted local kind."""

    layer_fields: ClassVar[frozenset[str]] = AttentionSpec.layer_fields | {"sliding_window", "attention_chunk_size"}

    sliding_window: int | None = None  # mask of a promoted window
    attention_chunk_size: int | None = None  # mask of promoted chunks

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "full_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.block_size)


@final
class WholePrefixScan(HitScan):
    """The leading run of cached blocks, looked up once and cut as limits fall."""

    def __init__(self, manager: WholePrefixManager, lookup: PrefixLookup) -> None:
        self._manager = manager
        self._lookup = lookup
        self._run: np.ndarray | None = None  # int32[G, k]
        self._num_blocks = 0

    def longest(self, max_length: int) -> int:
        """Tokens of the run within the limit, without the dropped block."""
        lookup, size = self._lookup, self._manager.block_size
        most = max_length // size
        if self._run is None:
            self._run = self._manager.cached_run(lookup.block_hashes, most)
        num_tokens = (min(self._run.shape[1], most) - lookup.drop_last_block) * size
        num_tokens = max(num_tokens - num_tokens % lookup.alignment, 0)
        self._num_blocks = num_tokens // size
        return num_tokens

    def ids(self) -> np.ndarray:  # int32[G, k]
        """The run's first blocks."""
        assert self._run is not None  # `longest` comes first
        return self._run[:, : self._num_blocks]


class WholePrefixManager(PositionalManager):
    """Holds every block of a request until the request is freed."""

    hits_are_prefix_closed: ClassVar[bool] = True
    frees_skipped_blocks: ClassVar[bool] = False

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: every token is attended to for ever."""
        return 0

    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """None, for int64[n] rows."""
        return np.zeros_like(num_computed_tokens)

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """`NEVER`."""
        return first_live * 0 + NEVER

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Left to right until the first miss: hashes are chained, so nothing after a miss can be of this prefix."""
        return WholePrefixScan(self, lookup)

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """How many leading blocks all running rows share.

        Only blocks with at least one reference per row are candidates. Their tables are then compared, since pins and
        copies hold references too.
        """
        own = self.row_block_ids(row)
        candidates = self.block_pool.ref_count[own] >= num_running_requests
        running = np.flatnonzero(self.num_blocks)
        counts = []
        for table, ids, is_candidate in zip(self.block_tables, own, candidates, strict=True):
            first = _num_leading(is_candidate)
            counts.append(_num_leading((table[running, :first] == ids[:first]).all(axis=0)) if first else 0)
        return counts


@final
@register_kv_cache_manager(FullAttentionSpec)
class FullAttentionManager(WholePrefixManager):
    """Every token over one or more ranks."""

    supports_context_parallelism: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True


def _num_leading(flags: np.ndarray) -> int:
    """How many of bool[k] are true before the first that is not."""
    return flags.size if flags.all() else int(flags.argmin())
