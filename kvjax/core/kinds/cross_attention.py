"""Cross attention: the decoder reads what an encoder made of a request's own input, which never changes.

Source:  vLLM v1/kv_cache_interface.py (CrossAttentionSpec), v1/core/single_type_kv_cache_manager.py

A request's blocks are those of its encoder tokens, all taken when it is admitted and held until it ends; decoding takes
none. They are never registered: another request has another input, or runs its encoder again.

What the *other* layers cache depends on the encoder's input too. So in a model with cross attention a request looks up
nothing unless something in the hash of its first block names that input: a multimodal item there, or a salt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.columns import ColumnManager
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.registry import register_kv_cache_manager
from kvjax.core.kinds.single_type_manager import NEVER, IntOrArray
from kvjax.core.spec import AttentionSpec, cdiv
from kvjax.core.tables.column_runs import NO_RUNS
from kvjax.core.tables.row_changes import RowChanges


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of at most `max_num_encoder_tokens` encoder tokens."""

    reads_encoder: ClassVar[bool] = True

    max_num_encoder_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_encoder_tokens < 1:
            raise ValueError(f"expected max_num_encoder_tokens >= 1, got {self.max_num_encoder_tokens}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "cross_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of the longest encoder input, however long the request is."""
        return cdiv(self.max_num_encoder_tokens, self.block_size)


@final
@register_kv_cache_manager(CrossAttentionSpec)
class CrossAttentionManager(ColumnManager):
    """Blocks by encoder tokens, for the request's whole life."""

    supports_eagle: ClassVar[bool] = True
    hits_are_prefix_closed: ClassVar[bool] = True
    frees_skipped_blocks: ClassVar[bool] = False
    is_prefix_cacheable: ClassVar[bool] = False

    kv_cache_spec: CrossAttentionSpec

    @property
    def max_encoder_tokens(self) -> int:
        """As the spec says."""
        return self.kv_cache_spec.max_num_encoder_tokens

    def slots_of(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Slots are the encoder's tokens."""
        return num_encoder_tokens

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: every encoder token is attended to for ever."""
        return 0

    def count_skipped_tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray:
        """None, for int64[n] rows."""
        return np.zeros_like(num_computed_tokens)

    def tokens_until_release(self, first_live: IntOrArray) -> IntOrArray:
        """`NEVER`."""
        return first_live * 0 + NEVER

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Nothing is ever registered.

        Raises:
            NotImplementedError: always; coordinators do not ask.
        """
        raise NotImplementedError("cross_attention blocks are no prefix hits; look up the other groups")

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """None: every request has an encoder input of its own."""
        return [0] * self.num_groups

    def worst_case_blocks(self, num_slots: int) -> int:
        """Blocks of the longest encoder input."""
        return self.num_groups * self.max_admission_blocks

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """None: decoding takes no blocks."""
        return 0

    def held_slots(self, row: int) -> int:
        """`NEVER`: the encoder's blocks serve any number of tokens."""
        return NEVER

    def written_column(self, row: int, num_tokens: int) -> int | None:
        """None: decoding writes nothing."""
        return None

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows all of the row's blocks, by reference."""
        self.share_columns(row, new_rows, self.num_blocks.item(row))

    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """No change."""
        return RowChanges(
            skipped=NO_RUNS,
            needed=NO_RUNS,
            filled=NO_RUNS,
            num_blocks=self.num_blocks[rows],
            num_cached_blocks=self.num_cached_blocks[rows],
            first_live=NO_RUNS.starts,
            idle_until=np.full(rows.size, NEVER),
        )
