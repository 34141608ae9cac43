"""`PageBatchInfo` of levanter from a step plan, one per KV-cache group.

Flow:    StepPlan, StepShape -> [page_batch_info_fields] -> numpy by field -> the stack's object, axes named
Source:  marin-community/levanter, src/levanter/inference/page_table.py

What is not there is -1 in every array. K and V are written to `new_token_dests`, one slot a token, before attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.adapters.padded_step import StepShape, padded
from kvjax.adapters.signatures import Stack
from kvjax.adapters.stack import require_stack
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan

LEVANTER = Stack("levanter")
INVALID = -1
_AXES = {
    "slot_ids": ("seq",),
    "page_indices": ("seq", "page"),
    "seq_lens": ("seq",),
    "cu_q_lens": ("seq",),
    "new_token_dests": ("position",),
}


def page_batch_info_fields(plan: StepPlan, config: KVCacheConfig, shape: StepShape) -> tuple[dict[str, Any], ...]:
    """Per group the fields of its `PageBatchInfo`, int32 numpy arrays by name.

    `slot_ids` [S] rows of the request table, `page_indices` [S, P], `seq_lens` [S], `cu_q_lens` [S + 1] (offsets beyond
    the step's requests repeat the last one), `num_seqs` [], `new_token_dests` [T], and the group's `page_size`.

    Raises:
        ValueError: the step is larger than the shape.
        NotImplementedError: as `padded_step.padded`, or a group of recurrent states.
    """
    out = []
    for group, spec in zip(plan.groups, config.kv_cache_groups, strict=True):
        step = padded(plan, group, shape)
        if step.states is not None:
            raise NotImplementedError(
                f"expected a group of attention, got {group.kind}: levanter has no pages of states"
            )
        is_real = np.arange(shape.num_requests) < plan.num_requests
        slot_ids = np.full(shape.num_requests, INVALID, np.int32)
        slot_ids[: plan.num_requests] = plan.rows
        out.append(
            {
                "slot_ids": slot_ids,
                "page_indices": np.where(step.block_tables > 0, step.block_tables, INVALID).astype(np.int32),
                "seq_lens": np.where(is_real, step.seq_lens, INVALID).astype(np.int32),
                "cu_q_lens": step.query_start_loc,
                "num_seqs": np.array(plan.num_requests, np.int32),
                "new_token_dests": step.slot_mapping,
                "page_size": spec.kv_cache_spec.block_size,
            }
        )
    return tuple(out)


def to_page_batch_info(plan: StepPlan, config: KVCacheConfig, shape: StepShape) -> tuple[Any, ...]:
    """levanter's `PageBatchInfo` of each group: haliax arrays with the axes that it names.

    Raises:
        MissingStackError: levanter or haliax cannot be imported.
        UnknownStackError: its `PageBatchInfo` is none of the recorded versions'.
        ValueError, NotImplementedError: as `page_batch_info_fields`.
    """
    info = LEVANTER.load("PageBatchInfo")
    named = require_stack("haliax", "levanter", LEVANTER.versions).named
    jnp = require_stack("jax.numpy", "levanter", LEVANTER.versions)

    def array(name: str, value: Any) -> Any:
        if name in _AXES:
            return named(jnp.asarray(value), _AXES[name])
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    return tuple(
        info(**{name: array(name, value) for name, value in fields.items()})
        for fields in page_batch_info_fields(plan, config, shape)
    )
