"""`AttentionMetadata` of tpu-inference from a step plan, one per KV-cache group.

Flow:    StepPlan, StepShape -> [attention_metadata_fields] -> numpy by field -> [to_attention_metadata] -> the stack's
Source:  vllm-project/tpu-inference, layers/common/attention_metadata.py and the docstrings of its kernels

The kernels write a step's K and V themselves, at the last `query_start_loc[i + 1] - query_start_loc[i]` of
`seq_lens[i]` places of request i, so there is no slot mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.adapters.padded_step import StepShape, padded
from kvjax.adapters.signatures import Stack
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan

TPU_INFERENCE = Stack("tpu_inference")


def attention_metadata_fields(plan: StepPlan, shape: StepShape) -> tuple[dict[str, Any], ...]:
    """Per group the fields of its `AttentionMetadata` that a step decides, int32 numpy arrays by name.

    `input_positions` [T] or [3, T], `block_tables` [S * P], `seq_lens` [S], `query_start_loc` [S + 1],
    `request_distribution` [3], `mamba_state_indices` [S] or None, and the number S as `padded_num_reqs`.

    A plan has one table per group, and tpu-inference one slot of state per request: the state of every group of
    recurrent layers is its own `mamba_state_indices`.

    Raises:
        ValueError: the step is larger than the shape.
        NotImplementedError: as `padded_step.padded`.
    """
    out = []
    for group in plan.groups:
        step = padded(plan, group, shape)
        out.append(
            {
                "input_positions": step.positions,
                "block_tables": step.block_tables.reshape(-1),
                "seq_lens": step.seq_lens,
                "query_start_loc": step.query_start_loc,
                "request_distribution": step.distribution,
                "mamba_state_indices": step.states,
                "padded_num_reqs": shape.num_requests,
            }
        )
    return tuple(out)


def to_attention_metadata(
    plan: StepPlan,
    shape: StepShape,
    *,
    to_device: Callable[[np.ndarray], Any] | None = None,  # None: arrays stay numpy's
) -> tuple[Any, ...]:
    """tpu-inference's `AttentionMetadata` of each group.

    Raises:
        MissingStackError: tpu-inference cannot be imported.
        UnknownStackError: its `AttentionMetadata` is none of the recorded versions'.
        ValueError, NotImplementedError: as `attention_metadata_fields`.
    """
    metadata = TPU_INFERENCE.load("AttentionMetadata")
    return tuple(
        metadata(**{name: _on_device(value, to_device) for name, value in fields.items()})
        for fields in attention_metadata_fields(plan, shape)
    )


def to_grouped_attention_metadata(
    plan: StepPlan,
    config: KVCacheConfig,
    shape: StepShape,
    *,
    to_device: Callable[[np.ndarray], Any] | None = None,
) -> Any:
    """tpu-inference's `GroupedAttentionMetadata`: each layer's metadata by name, layers that share pages included.

    Raises:
        As `to_attention_metadata`.
    """
    grouped = TPU_INFERENCE.load("GroupedAttentionMetadata")
    names: list[list[str]] = [[] for _ in config.kv_cache_groups]
    for name, (group_id, _) in config.layer_index.items():
        names[group_id].append(name)
    return grouped(to_attention_metadata(plan, shape, to_device=to_device), tuple(tuple(group) for group in names))


def _on_device(value: Any, to_device: Callable[[np.ndarray], Any] | None) -> Any:
    return to_device(value) if to_device is not None and isinstance(value, np.ndarray) else value
