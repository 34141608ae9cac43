"""Spec of layers whose page is one recurrent state of everything before it: Mamba, linear attention, gated delta rule.

Flow:    a kind's spec says which arrays a state has -> [RecurrentSpec] -> KVCacheGroupSpec -> RecurrentManager
Source:  vLLM v1/kv_cache_interface.py (MambaSpec)
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

import numpy as np

from kvjax.core.spec import KVCacheSpec, StatePages
from kvjax.core.tables.ints_or_arrays import IntOrArray, at_least
from pallas_kernels.layouts import PageLayout, dtype_bits, recurrent_layout

MODES = ("none", "align")


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(KVCacheSpec):
    """One state a page. What a kind adds are the arrays of a state, or what they follow from, and its name."""

    layer_fields: ClassVar[frozenset[str]] = frozenset({"page_size_padded", "head_axes", "lane_arrays"})
    forgets: ClassVar[bool] = True

    mamba_cache_mode: str = "none"  # vLLM's name, of any recurrent kind
    num_speculative_blocks: int = 0  # one state per drafted token
    # States that a step leaves on its way, at the last length that the same prompt can hit: 0 or 1; vLLM 0.33's name.
    num_prefill_checkpoint_blocks: int = 0
    # They are so many tokens behind the step's start, or a multiple; None: the device leaves none.
    prefill_checkpoint_alignment: int | None = None
    num_ring_drafts: int = 0  # drafts of a step that have no state, since pages have rings (`RingStateSpec`)
    head_axes: tuple[int, ...] = ()  # of each array; (): the first
    lane_arrays: tuple[int, ...] = ()  # those that are whole lanes behind their heads on TPU
    page_size_padded: int | None = None  # bytes; None: as the state needs

    @property
    @abc.abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each array of one state, for example of convolution and recurrence."""

    @property
    @abc.abstractmethod
    def state_dtypes(self) -> tuple[str, ...]:
        """The dtype of each array of one state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes, dtypes = self.state_shapes, self.state_dtypes
        if not shapes or len(shapes) != len(dtypes):
            raise ValueError(f"expected a dtype for each of one or more shapes, got {shapes} and {dtypes}")
        if any(size < 1 for shape in shapes for size in shape):
            raise ValueError(f"expected sizes >= 1 in shapes, got {shapes}")
        for dtype in dtypes:
            dtype_bits(dtype)
        self.page_layout("tpu")  # refuses lane_arrays that are none
        if self.mamba_cache_mode not in MODES:
            raise ValueError(f"expected mamba_cache_mode none or align, got {self.mamba_cache_mode!r}")
        if self.num_speculative_blocks < 0:
            raise ValueError(f"expected num_speculative_blocks >= 0, got {self.num_speculative_blocks}")
        if self.num_prefill_checkpoint_blocks not in (0, 1):
            raise ValueError(
                f"expected num_prefill_checkpoint_blocks of 0 or 1, got {self.num_prefill_checkpoint_blocks}"
            )
        if self.prefill_checkpoint_alignment is not None and self.prefill_checkpoint_alignment < 1:
            raise ValueError(f"expected prefill_checkpoint_alignment >= 1, got {self.prefill_checkpoint_alignment}")
        if self.page_size_padded is not None and self.state_bytes > self.page_size_padded:
            raise ValueError(
                f"expected page_size_padded >= {self.state_bytes}, the bytes of a state, got {self.page_size_padded}"
            )

    @property
    def split_axes(self) -> tuple[int, ...]:
        """Which axis of each array has heads or channels, whatever tensor parallelism splits."""
        return self.head_axes or (0,) * len(self.state_shapes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        arrays = zip(self.state_shapes, self.state_dtypes, strict=True)
        return sum(prod(shape) * dtype_bits(dtype) // 8 for shape, dtype in arrays)

    @property
    def state_pages(self) -> StatePages:
        """The spec itself."""
        return self

    @property
    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """None: a page is one state."""
        return ()

    @property
    def tokens_per_state(self) -> int:
        """1: a state is not divided among tokens."""
        return 1

    @property
    def num_reserved_blocks(self) -> int:
        """None."""
        return 0

    @property
    def page_size_bytes(self) -> int:
        """One state, or what its page is padded to."""
        return self.state_bytes if self.page_size_padded is None else self.page_size_padded

    def page_layout(self, platform: str, num_shards: int = 1) -> PageLayout:
        """Arrays that hold one layer's states, over any `num_shards` devices.

        `page_size_padded` is for stacks that lay out bytes.
        """
        return recurrent_layout(
            shapes=self.state_shapes,
            dtypes=self.state_dtypes,
            head_axes=self.split_axes,
            lane_arrays=self.lane_arrays,
            platform=platform,
        )

    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """All but the last token: its state holds what came before."""
        return at_least(num_computed_tokens - 1, 0)

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """Computed tokens whose state is behind them."""
        return num_tokens + 1

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """The running state, those of drafts, and with `align` the state that the step starts from and a checkpoint."""
        if self.mamba_cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return 2 + self.num_prefill_checkpoint_blocks + self.num_speculative_blocks

    def pages_of_states(
        self,
        table: np.ndarray,  # int32[rows, columns]
        num_blocks: np.ndarray,  # int64[rows]
        rows: np.ndarray,  # int64[S]
        num_tokens: np.ndarray,  # int64[S]
    ) -> np.ndarray:  # int32[S]
        """The page of each row's state after `num_tokens` tokens: in its column or, without a block, the next with one.

        Of rows without tokens it is the null page where their first column has no block.
        """
        if self.mamba_cache_mode == "none":
            return table[rows, num_blocks[rows] - 1 - self.num_speculative_blocks]
        columns = np.maximum(num_tokens - 1, 0) // self.block_size
        pages = table[rows, columns]
        passed = ((pages == 0) & (num_tokens > 0)).nonzero()[0]
        rows, columns = rows[passed], columns[passed]
        while passed.size:
            columns += 1
            pages[passed] = found = table[rows, columns]
            is_null = found == 0
            passed, rows, columns = passed[is_null], rows[is_null], columns[is_null]
        return pages

    @property
    def num_drafts(self) -> int:
        """Those with states, or those in rings."""
        return max(self.num_speculative_blocks, self.num_ring_drafts)

    def pages_of_drafts(
        self,
        table: np.ndarray,  # int32[rows, columns]
        num_blocks: np.ndarray,  # int64[rows]
        rows: np.ndarray,  # int64[S]
        num_tokens: np.ndarray,  # int64[S]
    ) -> np.ndarray:  # int32[S, s]
        """Speculative blocks, the first in the last column; the block of a column for the state at its end."""
        back = np.arange(self.num_speculative_blocks, 0, -1)  # tokens behind the state
        running = num_blocks[rows] - 1 - self.num_speculative_blocks
        pages = table[rows[:, None], running[:, None] + back]
        if self.mamba_cache_mode == "none":
            return pages
        num_before = np.maximum(num_tokens[:, None] - back, 0)
        ending, place = (num_before % self.block_size == 0).nonzero()
        own = table[rows[ending], np.maximum(num_before[ending, place] // self.block_size - 1, 0)]
        pages[ending, place] = np.where(own == 0, pages[ending, place], own)
        return pages

    def most_tokens(self, num_blocks: np.ndarray) -> np.ndarray:
        """Tokens that rows with int64[S] `num_blocks` columns may have."""
        tokens = (num_blocks - self.num_speculative_blocks) * self.block_size
        return tokens if self.mamba_cache_mode == "align" else np.where(tokens > 0, np.iinfo(np.int64).max, 0)


@dataclass(frozen=True, kw_only=True)
class StateArraysSpec(RecurrentSpec):
    """Arrays of one state: `shapes` and `dtypes` side by side."""

    layer_fields: ClassVar[frozenset[str]] = RecurrentSpec.layer_fields | {"shapes", "dtypes"}
    supports_eagle: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]  # of each array of one state
    dtypes: tuple[str, ...]  # of each array

    def common_fields(self) -> dict[str, Any]:
        """The fields that every kind with such arrays has, by name: what another kind is made of."""
        return {field.name: getattr(self, field.name) for field in fields(StateArraysSpec)}

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`shapes`."""
        return self.shapes

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """`dtypes`."""
        return self.dtypes


__all__ = ["RecurrentSpec", "StateArraysSpec"]
