"""`RaggedPagesMetadata` of EasyDeL from a step plan, one per KV-cache group.

Flow:    StepPlan, StepShape -> [ragged_pages_metadata_fields] -> numpy by field -> the stack's object
Source:  erfanzar/EasyDeL, easydel/caching/ragged_page/cache.py; kernels of erfanzar/ejkernel

Version "v3" has K and V written by the kernel, so there is no slot mapping. Version "v2" has them written before, by
slices: runs of tokens of one request within one page.
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


def ragged_pages_metadata_fields(
    plan: StepPlan,
    config: KVCacheConfig,
    shape: StepShape,
    *,
    num_slices_per_update: int | None = None,  # of the cache's config, for version "v2"; None: version "v3"
) -> tuple[dict[str, Any], ...]:
    """Per group the fields of its `RaggedPagesMetadata` that a step decides, int32 numpy arrays by name.

    `pages_tables` [S, P], `context_lens` [S], `query_start_loc` [S + 1], `num_seqs` [1], `position_ids` [T] or [3, T],
    and the group's `page_size`. Version "v3": `request_distribution` [3]. Version "v2": `slot_mapping` [3, slices] as
    `write_slices`, padded as the stack pads, `num_kv_update_slices` [1] and `num_slices_per_kv_cache_update_page`.

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
        page_size = spec.kv_cache_spec.block_size
        fields = {
            "pages_tables": step.block_tables,
            "context_lens": step.seq_lens,
            "query_start_loc": step.query_start_loc,
            "num_seqs": np.array([plan.num_requests], np.int32),
            "position_ids": step.positions,
            "page_size": page_size,
        }
        if num_slices_per_update is None:
            fields |= {"version": "v3", "request_distribution": step.distribution}
        else:
            slices = write_slices(step.slot_mapping, step.query_start_loc, page_size)
            most = min(2 * shape.num_requests + shape.num_tokens // page_size, shape.num_tokens)
            padded_slices = np.zeros((3, -(-most // num_slices_per_update) * num_slices_per_update), np.int32)
            padded_slices[:, : slices.shape[1]] = slices
            fields |= {
                "version": "v2",
                "slot_mapping": padded_slices,
                "num_kv_update_slices": np.array([slices.shape[1]], np.int32),
                "num_slices_per_kv_cache_update_page": num_slices_per_update,
            }
        out.append(fields)
    return tuple(out)


def write_slices(
    slot_mapping: np.ndarray,  # int32[T], -1: nothing is written
    query_start_loc: np.ndarray,  # int32[S + 1]
    page_size: int,
) -> np.ndarray:  # int32[3, slices]
    """First slot, first token and length of each run of tokens of one request within one page."""
    follows = np.zeros(len(slot_mapping), np.bool_)
    follows[1:] = (np.diff(slot_mapping) == 1) & (slot_mapping[1:] % page_size != 0)
    follows[query_start_loc[query_start_loc < len(slot_mapping)]] = False
    tokens = np.flatnonzero(~follows)
    lengths = np.diff(np.append(tokens, len(slot_mapping)))
    is_written = slot_mapping[tokens] >= 0
    return np.stack([slot_mapping[tokens], tokens, lengths])[:, is_written].astype(np.int32)


def to_ragged_pages_metadata(
    plan: StepPlan,
    config: KVCacheConfig,
    shape: StepShape,
    *,
    num_slices_per_update: int | None = None,  # of the cache's config, for version "v2"; None: version "v3"
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
        for fields in ragged_pages_metadata_fields(plan, config, shape, num_slices_per_update=num_slices_per_update)
    )
