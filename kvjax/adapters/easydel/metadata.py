"""`RaggedPagesMetadata` of EasyDeL, version "v3", from a step plan, one per KV-cache group.

Flow:    StepPlan, StepShape -> [ragged_pages_metadata_fields] -> numpy by field -> the stack's object
Source:  erfanzar/EasyDeL, easydel/caching/ragged_page/cache.py; kernels of erfanzar/ejkernel

Version 3 has K and V written by the kernel, so there is no slot mapping; the slices of version 2 are not made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.adapters.padded_step import StepShape, padded
from kvjax.adapters.signatures import Stack
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan

EASYDEL = Stack("easydel")


def ragged_pages_metadata_fields(plan: StepPlan, config: KVCacheConfig, shape: StepShape) -> tuple[dict[str, Any], ...]:
    """Per group the fields of its `RaggedPagesMetadata` that a step decides, int32 numpy arrays by name.

    `pages_tables` [S, P], `context_lens` [S], `query_start_loc` [S + 1], `num_seqs` [1], `position_ids` [T] or [3, T],
    `request_distribution` [3], and the group's `page_size`.

    Raises:
        ValueError: the step is larger than the shape.
        NotImplementedError: as `padded_step.padded`, or a group of recurrent states, which are none of its pages.
    """
    out = []
    for group, spec in zip(plan.groups, config.kv_cache_groups, strict=True):
        step = padded(plan, group, shape)
        if step.states is not None:
            raise NotImplementedError(
                f"expected a group of attention, got {group.kind}: EasyDeL has no pages of states"
            )
        out.append(
            {
                "pages_tables": step.block_tables,
                "context_lens": step.seq_lens,
                "query_start_loc": step.query_start_loc,
                "num_seqs": np.array([plan.num_requests], np.int32),
                "position_ids": step.positions,
                "request_distribution": step.distribution,
                "version": "v3",
                "page_size": spec.kv_cache_spec.block_size,
            }
        )
    return tuple(out)


def to_ragged_pages_metadata(
    plan: StepPlan,
    config: KVCacheConfig,
    shape: StepShape,
    *,
    to_device: Callable[[np.ndarray], Any] | None = None,  # None: arrays stay numpy's
) -> tuple[Any, ...]:
    """EasyDeL's `RaggedPagesMetadata` of each group.

    Raises:
        MissingStackError: EasyDeL cannot be imported.
        UnknownStackError: its `RaggedPagesMetadata` is none of the recorded versions'.
        ValueError, NotImplementedError: as `ragged_pages_metadata_fields`.
    """
    metadata = EASYDEL.load("RaggedPagesMetadata")
    return tuple(
        metadata(
            **{
                name: to_device(value) if to_device is not None and isinstance(value, np.ndarray) else value
                for name, value in fields.items()
            }
        )
        for fields in ragged_pages_metadata_fields(plan, config, shape)
    )
