"""levanter's reference attention over converted steps.

Flow:    AttendedStep, page_batch_info_fields -> its default_ragged_paged_attention -> (outputs, pages after)

Its own module imports trainers, so the function is taken alone; it needs haliax, with stand-ins for what haliax
quantizes with. K and V of a head lie side by side in its pages; the new ones are put where `new_token_dests` says.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.adapters.levanter import page_batch_info_fields
from scripts.stack_checks.checkouts import function_of
from scripts.stack_checks.random_steps import KV_HEADS, SM_SCALE, AttendedStep, random_steps

_QUANTIZERS = ("aqt", "aqt.jax", "aqt.jax.v2", "aqt.jax.v2.config", "aqt.jax.v2.aqt_dot_general", "qwix")
_QUANTIZERS += ("qwix._src", "qwix._src.core", "qwix._src.core.dot_general", "qwix._src.core.ragged_dot")


def answers(root: Path, seed: int) -> Iterator[tuple[str, tuple[AttendedStep, np.ndarray, tuple[np.ndarray, ...]]]]:
    """(case, its step, the stack's outputs, the stack's pages after)."""
    for name in _QUANTIZERS:
        sys.modules.setdefault(name, MagicMock(name=name))
    if not hasattr(jax.core, "is_constant_dim"):  # haliax asks it of sizes, which are numbers here
        jax.core.is_constant_dim = lambda size: isinstance(size, int)  # type: ignore[attr-defined]
    hax = importlib.import_module("haliax")
    source = root / "levanter" / "layers" / "attention.py"
    attend = function_of(source, "default_ragged_paged_attention", {"hax": hax, "jax": jax, "jnp": jnp})
    for step in random_steps(seed, "full"):
        fields = page_batch_info_fields(step.plan, step.config, step.shape)[0]
        dests, size = fields["new_token_dests"], fields["page_size"]
        pages = tuple(array.copy() for array in step.pages)
        is_real = dests >= 0
        for array, new in zip(pages, step.new_kv, strict=True):
            array[dests[is_real] // size, dests[is_real] % size] = new[is_real]
        kv = np.stack(pages, axis=3).reshape(*pages[0].shape[:2], 2 * KV_HEADS, -1)
        q = step.q.reshape(len(step.q), KV_HEADS, -1, step.q.shape[-1])
        out = attend(
            hax.named(jnp.asarray(q), ("position", "kv_head", "q_heads_per_group", "head_size")),
            hax.named(jnp.asarray(kv), ("page", "slot", "kv_head", "head_size")),
            hax.named(jnp.asarray(fields["seq_lens"]), ("seq",)),
            hax.named(jnp.asarray(fields["page_indices"]), ("seq", "page")),
            jnp.asarray(fields["cu_q_lens"]),
            jnp.asarray(fields["num_seqs"]),
            SM_SCALE,
        )
        yield "PageBatchInfo, full", (step, np.asarray(out.array).reshape(step.q.shape), pages)
