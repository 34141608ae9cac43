"""Random steps of a manager: plans, new K and V, pages before and after, and what kvjax's reference attends to.

Flow:    seed, kind of model -> manager, plans -> pallas_kernels' reference -> [AttendedStep] -> a stack's reference

Kinds: "full", "windowed", "hybrid" (both in one manager) and "mla". Pages are split K and V; of "mla", latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.padded_step import Shape
from kvjax.core import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    StepPlan,
    build_step_plan,
)
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

KINDS = ("full", "windowed", "hybrid", "mla")
WINDOW = 6
BLOCK_SIZE = 4
Q_HEADS, KV_HEADS = 4, 2
LKV_DIM, R_DIM = 24, 8
SM_SCALE = 0.25
_NUM_BLOCKS = 40
_SHAPE = Shape(num_tokens=32, num_requests=5, num_columns=8)

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class AttendedStep:
    """One group's part of a step. `pages` and `written` are (K, V) [pages, page_size, heads, dim], or (latents,)."""

    plan: StepPlan
    config: KVCacheConfig
    group_id: int
    shape: Shape
    window: int | None
    q: np.ndarray  # float32[T, Hq, D]; of MLA the part without rotation, then the rotary one
    new_kv: Arrays  # (K, V) float32[T, Hkv, D], or (latents [T, Dl + Dr],)
    pages: Arrays  # before the step
    written: Arrays  # after it
    out: np.ndarray  # float32[real tokens, Hq, Dv] of kvjax's reference


def random_steps(seed: int, kind: str, head_dim: int = 16, num_steps: int = 4) -> Iterator[AttendedStep]:
    """Steps of a manager that starts, decodes, chunks and frees requests at random."""
    rng = np.random.default_rng(seed)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": head_dim, "dtype": "float32"}
    full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=WINDOW)
    latent = MLAAttentionSpec(block_size=BLOCK_SIZE, head_size=LKV_DIM + R_DIM, dtype="float32")
    specs: tuple[KVCacheSpec, ...] = {
        "full": (full,),
        "windowed": (window,),
        "hybrid": (full, window),
        "mla": (latent,),
    }[kind]
    config = KVCacheConfig.single_pool(_NUM_BLOCKS, *specs)
    manager = KVCacheManager(config, max_model_len=_SHAPE.num_columns * BLOCK_SIZE, hash_block_size=BLOCK_SIZE)
    shapes = ((LKV_DIM + R_DIM,),) if kind == "mla" else ((KV_HEADS, head_dim),) * 2
    pages = [tuple(np.zeros((_NUM_BLOCKS, BLOCK_SIZE, *shape), np.float32) for shape in shapes) for _ in specs]
    for plan in _plans(rng, manager, num_steps):
        for group_id, spec in enumerate(specs):
            dim = LKV_DIM + R_DIM if kind == "mla" else head_dim
            q = _normal(rng, _SHAPE.num_tokens, Q_HEADS, dim)
            new_kv = tuple(_normal(rng, _SHAPE.num_tokens, *shape) for shape in shapes)
            limit = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
            before = pages[group_id]
            pages[group_id], out = _attend(plan, group_id, q, new_kv, before, limit)
            yield AttendedStep(plan, config, group_id, _SHAPE, limit, q, new_kv, before, pages[group_id], out)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _plans(rng: np.random.Generator, manager: KVCacheManager, num_steps: int) -> Iterator[StepPlan]:
    running: list[Request] = []
    for step in range(num_steps):
        for request in [r for r in running if r.num_computed_tokens + 8 > _SHAPE.num_columns * BLOCK_SIZE]:
            manager.free(request)
            running.remove(request)
        while len(running) < 2 + step % 3:
            length = int(rng.integers(1, 14))
            name = f"{step}-{len(running)}"
            running.append(Request(name, rng.integers(0, 99, length)))
        rows, counts = [], []
        for request in running:
            left = request.num_tokens - request.num_computed_tokens
            count = left if left == 1 else int(rng.integers(1, min(left, 6) + 1))
            assert manager.allocate_slots(request, count) is not None
            rows.append(request.row)
            counts.append(count)
        yield build_step_plan(manager, np.array(rows), np.array(counts))
        for request, count in zip(running, counts, strict=True):
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(int(rng.integers(0, 99)))


def _attend(
    plan: StepPlan, group_id: int, q: np.ndarray, new_kv: Arrays, pages: Arrays, window: int | None
) -> tuple[Arrays, np.ndarray]:
    """(pages after the step, outputs) of pallas_kernels' reference for the step as the plan has it."""
    group, num_tokens = plan.groups[group_id], plan.num_tokens
    written = tuple(array.copy() for array in pages)
    for array, new in zip(written, new_kv, strict=True):
        array.reshape(-1, *array.shape[2:])[group.slot_mapping] = new[:num_tokens]
    rows = _SHAPE.num_requests - plan.num_requests  # one shape for all steps: one program
    step = [
        np.pad(group.block_tables, [(0, rows), (0, _SHAPE.num_columns - group.block_tables.shape[1])]),
        np.pad(group.seq_lens, (0, rows)),
        np.pad(plan.query_start_loc, (0, rows), mode="edge"),
        plan.distribution,
    ]
    arrays = [jnp.asarray(a, jnp.int32) for a in step]
    if len(pages) == 1:
        parts = (jnp.asarray(q[..., :LKV_DIM]), jnp.asarray(q[..., LKV_DIM:]))
        out = mla_paged_attention(
            *parts, (jnp.asarray(written[0]),), *arrays, sm_scale=SM_SCALE, backend="reference"
        ).out
    else:
        out = ragged_paged_attention(
            jnp.asarray(q),
            tuple(jnp.asarray(array) for array in written),
            *arrays,
            sm_scale=SM_SCALE,
            sliding_window=window,
            backend="reference",
        ).out
    return written, np.asarray(out)[:num_tokens]
