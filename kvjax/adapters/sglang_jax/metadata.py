"""`FlashAttentionMetadata` of sglang-jax from a step plan.

Flow:    StepPlan, StepShape -> [flash_attention_metadata_fields] -> numpy by field -> the stack's object
Source:  sgl-project/sglang-jax, srt/layers/attention/flashattention_backend.py

Page ids are packed: those of request i begin at `cu_kv_lens[i] // page_size`, and `cu_kv_lens` counts tokens in whole
pages. A model with two groups, one of them of sliding windows, has the pages of those in `swa_page_indices`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.adapters.padded_step import PaddedGroup, StepShape, padded
from kvjax.adapters.signatures import Stack
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan

SGLANG_JAX = Stack("sglang_jax")
_WINDOW = "sliding_window"


def flash_attention_metadata_fields(plan: StepPlan, config: KVCacheConfig, shape: StepShape) -> dict[str, Any]:
    """The fields of `FlashAttentionMetadata` that a step decides, int32 numpy arrays by name.

    `cu_q_lens` [S + 1], `cu_kv_lens` [S + 1], `page_indices` [S * P], `swa_page_indices` [S * P] or None, `seq_lens`
    [S], `distribution` [3]: ends of the decode, prefill and mixed requests. `custom_mask` is None.

    Raises:
        ValueError: the step is larger than the shape.
        NotImplementedError: more than one group besides at most one of sliding windows, blocks of two sizes, or as
            `padded_step.padded`.
    """
    whole = [i for i, group in enumerate(plan.groups) if group.kind != _WINDOW]
    windows = [i for i, group in enumerate(plan.groups) if group.kind == _WINDOW]
    if len(whole) > 1 or len(windows) > 1:
        kinds = [group.kind for group in plan.groups]
        raise NotImplementedError(f"expected a group of full attention, one of windows or both, got {kinds}")
    sizes = {config.kv_cache_groups[i].kv_cache_spec.block_size for i in whole + windows}
    if len(sizes) > 1:
        raise NotImplementedError(f"expected one page size of both groups, got {sorted(sizes)}")
    (page_size,) = sizes
    main = padded(plan, plan.groups[(whole or windows)[0]], shape)
    num_pages = _num_pages(main.seq_lens, page_size)
    starts = np.zeros(shape.num_requests + 1, np.int32)
    np.cumsum(num_pages * page_size, out=starts[1:])
    both = bool(whole and windows)
    return {
        "cu_q_lens": main.query_start_loc,
        "cu_kv_lens": starts,
        "page_indices": _packed(main, num_pages),
        "swa_page_indices": _packed(padded(plan, plan.groups[windows[0]], shape), num_pages) if both else None,
        "seq_lens": main.seq_lens,
        "distribution": main.distribution,
        "custom_mask": None,
    }


def to_flash_attention_metadata(
    plan: StepPlan,
    config: KVCacheConfig,
    shape: StepShape,
    *,
    to_device: Callable[[np.ndarray], Any] | None = None,  # None: arrays stay numpy's
) -> Any:
    """sglang-jax's `FlashAttentionMetadata`.

    Raises:
        MissingStackError: sglang-jax cannot be imported.
        UnknownStackError: its `FlashAttentionMetadata` is none of the recorded versions'.
        ValueError, NotImplementedError: as `flash_attention_metadata_fields`.
    """
    metadata = SGLANG_JAX.load("FlashAttentionMetadata")
    fields = flash_attention_metadata_fields(plan, config, shape)
    if to_device is not None:
        fields = {name: value if value is None else to_device(value) for name, value in fields.items()}
    return metadata(**fields)


def _num_pages(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Pages of each length."""
    return -(-lengths // page_size)


def _packed(group: PaddedGroup, num_pages: np.ndarray) -> np.ndarray:
    """The pages of all requests one after the other, 0 behind them: int32[S * P]."""
    tables = group.block_tables
    out = np.zeros(tables.size, np.int32)
    ids = tables[np.arange(tables.shape[1]) < num_pages[:, None]]
    out[: ids.size] = ids
    return out
