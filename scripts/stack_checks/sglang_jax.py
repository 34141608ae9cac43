"""sglang-jax's reference attention over converted steps.

Flow:    AttendedStep, flash_attention_metadata_fields -> its reference function -> (outputs, pages after)

Its reference reads pages that are written before, and a row of page ids per sequence; the rows are cut out of
the packed ids where `cu_kv_lens` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.sglang_jax import flash_attention_metadata_fields
from scripts.stack_checks.checkouts import module_of
from scripts.stack_checks.random_steps import BLOCK_SIZE, SM_SCALE, AttendedStep, random_steps

_KERNELS = "sgl_jax.srt.kernels.ragged_paged_attention"
_STANDS_IN = (f"{_KERNELS}.tuned_block_sizes_v3", "sgl_jax.srt.utils.jax_utils")


def answers(root: Path, seed: int) -> Iterator[tuple[str, tuple[AttendedStep, np.ndarray, tuple[np.ndarray, ...]]]]:
    """(case, its step, the stack's outputs, the stack's pages after)."""
    reference = module_of(root, f"{_KERNELS}.ragged_paged_attention_v3", _STANDS_IN).ref_ragged_paged_attention
    for kind in ("full", "windowed", "hybrid"):
        for step in random_steps(seed, kind):
            fields = flash_attention_metadata_fields(step.plan, step.config, step.shape)
            ids = fields["page_indices" if step.group_id == 0 else "swa_page_indices"]
            bounds = fields["cu_kv_lens"] // BLOCK_SIZE
            rows = np.zeros((step.shape.num_requests, step.shape.num_columns), np.int32)
            for i, row in enumerate(rows):
                row[: bounds[i + 1] - bounds[i]] = ids[bounds[i] : bounds[i + 1]]
            arrays = (fields["seq_lens"], rows, fields["cu_q_lens"], fields["distribution"][2:])
            out = reference(
                *map(jnp.asarray, (step.q, *step.written, *arrays)), sm_scale=SM_SCALE, sliding_window=step.window
            )
            yield f"FlashAttention, {kind}", (step, np.asarray(out), step.written)
