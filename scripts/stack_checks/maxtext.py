"""MaxText's own `Attention.forward_serve_vllm` over converted steps, with kvjax's op where tpu-inference's would be.

Flow:    AttendedStep -> forward_serve_vllm -> kvjax's sharded_ragged_paged_attention -> (outputs, pages after)

MaxText scales queries before the call, so they are scaled here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.maxtext import sharded_ragged_paged_attention
from kvjax.adapters.tpu_inference import RPAv3Layout, attention_metadata_fields
from scripts.stack_checks.checkouts import function_of
from scripts.stack_checks.random_steps import BLOCK_SIZE, KV_HEADS, SM_SCALE, AttendedStep, random_steps

_INTERFACE = "tpu_inference.layers.common.attention_interface"
AttentionType = Enum("AttentionType", "GLOBAL LOCAL_SLIDING")


def answers(root: Path, seed: int) -> Iterator[tuple[str, tuple[AttendedStep, np.ndarray, tuple[np.ndarray, ...]]]]:
    """(case, its step, the stack's outputs, the stack's pages after)."""
    parts = _INTERFACE.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    interface: Any = sys.modules[_INTERFACE]
    interface.sharded_ragged_paged_attention = sharded_ragged_paged_attention
    names = {"os": os, "jnp": jnp, "AttentionType": AttentionType}
    forward = function_of(root / "maxtext" / "layers" / "attentions.py", "forward_serve_vllm", names)
    for kind in ("full", "windowed", "hybrid"):
        for step in random_steps(seed, kind):
            layer = SimpleNamespace(
                config=SimpleNamespace(attention="vllm_rpa", sliding_window_size=step.window or 0),
                attention_type=AttentionType.LOCAL_SLIDING if step.window else AttentionType.GLOBAL,
                dtype=jnp.float32,
                mesh=None,
                share_kv_layer=False,
                sinks=None,
            )
            layout = RPAv3Layout(BLOCK_SIZE, "float32", KV_HEADS, step.q.shape[-1])
            fields = attention_metadata_fields(step.plan, step.shape)[step.group_id]
            metadata = SimpleNamespace(**{k: None if v is None else jnp.asarray(v) for k, v in fields.items()})
            q, k, v = (jnp.asarray(array)[None] for array in (step.q * SM_SCALE, *step.new_kv))
            out, cache = forward(layer, q, k, v, layout.pack(*map(jnp.asarray, step.pages)), metadata)
            yield f"forward_serve_vllm, {kind}", (step, np.asarray(out), tuple(map(np.asarray, layout.unpack(cache))))
