"""tpu-inference's reference attention over converted steps.

Flow:    AttendedStep, attention_metadata_fields -> its reference functions -> (outputs, pages after)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.tpu_inference import MLAv2Layout, RPAv3Hd64Layout, RPAv3Layout, attention_metadata_fields
from scripts.stack_checks.checkouts import module_of
from scripts.stack_checks.random_steps import (
    BLOCK_SIZE,
    KV_HEADS,
    LKV_DIM,
    R_DIM,
    SM_SCALE,
    AttendedStep,
    random_steps,
)

Answer = tuple[AttendedStep, np.ndarray, tuple[np.ndarray, ...]]
_STANDS_IN = ("tpu_inference.logger", "tpu_inference.utils", "tpu_inference.envs")


def answers(root: Path, seed: int) -> Iterator[tuple[str, Answer]]:
    """(case, its step, the stack's outputs, the stack's pages after)."""
    kernels = "tpu_inference.kernels"
    v3 = module_of(root, f"{kernels}.ragged_paged_attention.v3.kernel", _STANDS_IN)
    hd64 = module_of(root, f"{kernels}.ragged_paged_attention.v3.kernel_hd64", _STANDS_IN)
    mla = module_of(root, f"{kernels}.mla.v1.kernel", _STANDS_IN)
    for kind in ("full", "windowed", "hybrid"):
        for step in random_steps(seed, kind):
            yield f"RPA v3, {kind}", _kv(v3.ref_ragged_paged_attention, step, RPAv3Layout)
        for step in random_steps(seed, kind, head_dim=64):
            yield f"RPA v3 hd64, {kind}", _kv(hd64.ref_ragged_paged_attention_hd64, step, RPAv3Hd64Layout)
    for step in random_steps(seed, "mla"):
        yield "MLA v2, mla", _mla(mla.ref_mla_ragged_paged_attention, step)


def _arguments(step: AttendedStep) -> list[Any]:
    fields = attention_metadata_fields(step.plan, step.shape)[step.group_id]
    names = ("seq_lens", "block_tables", "query_start_loc", "request_distribution")
    return [jnp.asarray(fields[name]) for name in names]


def _kv(reference: Any, step: AttendedStep, layout_class: Any) -> Answer:
    layout = layout_class(BLOCK_SIZE, "float32", KV_HEADS, step.q.shape[-1])
    cache = layout.pack(*map(jnp.asarray, step.pages))
    out, cache = reference(
        *map(jnp.asarray, (step.q, *step.new_kv)),
        cache,
        *_arguments(step),
        sm_scale=SM_SCALE,
        sliding_window=step.window,
    )
    return step, np.asarray(out), tuple(np.asarray(array) for array in layout.unpack(cache))


def _mla(reference: Any, step: AttendedStep) -> Answer:
    layout = MLAv2Layout(BLOCK_SIZE, "float32", LKV_DIM, R_DIM)
    (latent,) = step.new_kv
    parts = (step.q[..., :LKV_DIM], step.q[..., LKV_DIM:], latent[:, :LKV_DIM], latent[:, LKV_DIM:])
    cache = layout.pack(jnp.asarray(step.pages[0]))
    out, cache = reference(*map(jnp.asarray, parts), cache, *_arguments(step), sm_scale=SM_SCALE)
    return step, np.asarray(out)[..., :LKV_DIM], (np.asarray(layout.unpack(cache)),)
