"""ejkernel's XLA attention, which EasyDeL calls, over converted steps.

Flow:    AttendedStep, ragged_pages_metadata_fields -> its ragged_paged_attention -> (outputs, pages after)

Of windowed groups only decoding requests are compared: ejkernel 0.0.80.3 starts reading at `kv_len - sliding_window`,
which leaves out keys that the earlier queries of a longer step see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.easydel import ragged_pages_metadata_fields
from kvjax.adapters.tpu_inference import RPAv3Layout
from scripts.stack_checks.checkouts import module_of
from scripts.stack_checks.random_steps import BLOCK_SIZE, KV_HEADS, SM_SCALE, AttendedStep, random_steps


def answers(root: Path, seed: int) -> Iterator[tuple[str, tuple[AttendedStep, np.ndarray, tuple[np.ndarray, ...]]]]:
    """(case, its step, the stack's outputs, the stack's pages after)."""
    attend = module_of(root, "ejkernel.kernels._xla.ragged_page_attention_v3._xla_impl_fwd").ragged_paged_attention
    for kind in ("full", "windowed", "hybrid"):
        for step in random_steps(seed, kind, head_dim=128):
            fields = ragged_pages_metadata_fields(step.plan, step.config, step.shape)[step.group_id]
            layout = RPAv3Layout(BLOCK_SIZE, "float32", KV_HEADS, 128)
            cache = layout.pack(*map(jnp.asarray, step.pages))
            names = ("context_lens", "pages_tables", "query_start_loc", "request_distribution")
            lengths, tables, starts, ends = (jnp.asarray(fields[name]) for name in names)
            out, cache = attend(
                *map(jnp.asarray, (step.q, *step.new_kv)),
                cache,
                lengths,
                tables.reshape(-1),
                starts,
                ends,
                softmax_scale=SM_SCALE,
                sliding_window=step.window,
            )
            pages = tuple(np.asarray(array) for array in layout.unpack(cache))
            name = f"ragged page v3, {kind}"
            if step.window is not None:
                step = replace(step, out=step.out[: step.plan.distribution[0]])
                name += ", decoding"
            if step.out.size:
                yield name, (step, np.asarray(out), pages)
