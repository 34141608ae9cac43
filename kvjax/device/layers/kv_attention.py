"""Attention over K and V per head: the step's are written into the layer's pages, then all queries attend.

Flow:    q, k, v of a layer + LayerStep -> [attend_kv] -> attention outputs, the layer's pages
Source:  pallas_kernels.ragged_paged_attention
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.layer_step import WHOLE, LayerStep
from kvjax.device.mesh import context_ranks
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.kv_write import kv_write
from pallas_kernels.ragged_paged_attention import MaskRule, plan, ragged_paged_attention


def attend_kv(
    layer: LayerStep,
    q: jax.Array,  # [T, num_q_heads, head_dim]
    k: jax.Array | None,  # [T, num_kv_heads, head_dim]; None: the pages hold them already
    v: jax.Array | None,  # [T, num_kv_heads, head_dim_v], likewise
    options: AttentionOptions,
) -> tuple[jax.Array, Column]:
    """[T, num_q_heads, head_dim_v] and the pages; each device attends with its own heads.

    Where the pages have more heads than K and V, each head lies on several devices (`planning.spec_rules.replicated`).

    Raises:
        ValueError: shapes are not the spec's, or the options look further back than the layer's group keeps.
        NotImplementedError: the layer's pages do not hold K and V.
    """
    given = (k, v, options.k_scale, options.v_scale)
    k, v, k_scale, v_scale = (None if x is None else _repeated(layer, x) for x in given)
    num_kv_heads = _check(layer, q, k, v)
    layer.check_visible(options)
    num_sink_tokens = _num_sink_tokens(layer, options)
    prompts = layer.group.prompt_tokens if options.sees_prompt else None
    per_head = {"sinks": options.sinks, "k_scale": k_scale, "v_scale": v_scale}

    bounds = (options.sliding_window, options.attention_chunk_size)
    mask = MaskRule(True, *bounds, num_sink_tokens, sinks_by_sequence=prompts is not None)
    schedule = kv_schedule(layer, q, num_kv_heads, mask)

    def attend(q, k, v, pages, per_head, tables, slot_mapping, schedule, prompts):  # type: ignore[no-untyped-def]
        op = partial(
            ragged_paged_attention,
            q,
            pages,
            *tables,
            new_kv=None if k is None else (k, v),
            sm_scale=options.sm_scale,
            sliding_window=options.sliding_window,
            attention_chunk_size=options.attention_chunk_size,
            num_sink_tokens=num_sink_tokens if prompts is None else prompts,
            soft_cap=options.soft_cap,
            schedule=schedule,
            num_kv_heads=num_kv_heads // layer.placement.num_shards,
            backend=layer.backend,
            k_scale=per_head["k_scale"],
            v_scale=per_head["v_scale"],
        )
        slot_mapping = None if k is None else slot_mapping
        result = context_ranks.attend(layer.placement.context_ranks, op, slot_mapping, per_head["sinks"])
        return result.out, result.pages

    heads, page_specs = layer.heads(3, 1), layer.page_specs
    per_head_specs = {name: layer.per_head(x) for name, x in per_head.items()}
    in_specs = (heads, heads, heads, page_specs, per_head_specs, layer.by_rank, layer.by_rank, WHOLE, layer.by_rank)
    attend_on_each = layer.per_device(attend, in_specs, (heads, page_specs))
    step = (layer.tables, layer.group.slot_mapping, schedule, prompts)
    out, pages = attend_on_each(q, k, v, layer.pages, per_head, *step)
    return out, pages


def write_kv(layer: LayerStep, k: jax.Array, v: jax.Array, options: AttentionOptions) -> Column:
    """The layer's pages with K and V [T, num_kv_heads, head_dim] of the step, on one context rank.

    Raises:
        ValueError: shapes are not the spec's.
        NotImplementedError: the layer's pages do not hold K and V.
    """
    k, v = _repeated(layer, k), _repeated(layer, v)
    _check(layer, k, k, v)

    def write(k, v, pages, scales, slot_mapping):  # type: ignore[no-untyped-def]
        return kv_write(k, v, pages, slot_mapping, **scales, backend=layer.backend)

    given = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    scales = {name: None if x is None else _repeated(layer, x) for name, x in given.items()}
    heads, scale_specs = layer.heads(3, 1), {name: layer.per_head(x) for name, x in scales.items()}
    in_specs = (heads, heads, layer.page_specs, scale_specs, layer.by_rank)
    written: Column = layer.per_device(write, in_specs, layer.page_specs)(
        k, v, layer.pages, scales, layer.group.slot_mapping
    )
    return written


def kv_schedule(layer: LayerStep, q: jax.Array, num_kv_heads: int, mask: MaskRule) -> Any:
    """The plan of the step for the layers of the group with such queries, pages and mask, on each device alike."""
    num_shards = layer.placement.num_shards
    if not layer.plans_for_all:
        return None
    own_q = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // num_shards, q.shape[2]), q.dtype)
    own_pages = layer.shards_of(layer.pages)

    def make() -> Any:
        own_heads, is_decode = num_kv_heads // num_shards, layer.batch.is_decode
        given: dict[str, Any] = {"num_kv_heads": own_heads, "is_decode": is_decode, "backend": layer.backend}
        if mask.sinks_by_sequence:
            given["sink_tokens"] = layer.group.prompt_tokens
        return plan(own_q, own_pages, *layer.tables, mask, **given)

    shapes = tuple((array.shape, array.dtype.name) for array in (own_q, *own_pages))
    return layer.planned(("kv", shapes, mask), make)


def _repeated(layer: LayerStep, x: jax.Array) -> jax.Array:
    """K, V or a scale with each head once for every device that has it; as it is where heads are not replicated."""
    num_shards = layer.placement.num_shards
    shapes = layer.spec.entry_shapes
    if x.ndim == 0 or num_shards == 1 or not shapes or shapes[0][0] != num_shards:
        return x
    axis = 1 if x.ndim == 3 else 0
    return x if num_shards % x.shape[axis] else jnp.repeat(x, num_shards // x.shape[axis], axis=axis)


def _num_sink_tokens(layer: LayerStep, options: AttentionOptions) -> int:
    """First tokens that a query sees whatever its window, learned sinks among them."""
    if not layer.num_reserved_blocks:
        return options.num_sink_tokens
    if options.attention_chunk_size is not None:
        raise ValueError(
            f"layer {layer.name!r}: expected attention_chunk_size=None behind learned sinks, "
            f"got {options.attention_chunk_size}"
        )
    is_bounded = options.sliding_window is not None
    return options.num_sink_tokens + layer.num_reserved_blocks * layer.page_size * is_bounded


def _check(layer: LayerStep, q: jax.Array, k: jax.Array | None, v: jax.Array | None) -> int:
    """KV heads of the layer, whose arrays fit its spec."""
    shapes = layer.spec.entry_shapes
    if len(shapes) != 2:
        raise NotImplementedError(f"layer {layer.name!r}: expected a cache of K and V, got {layer.spec.kind}")
    num_kv_heads, head_dim = shapes[0]
    if k is not None and v is not None and (k.shape[1:], v.shape[1:]) != shapes:
        raise ValueError(
            f"layer {layer.name!r}: expected K and V of {shapes} a token, got {k.shape[1:]} and {v.shape[1:]}"
        )
    if q.shape[1] % num_kv_heads or q.shape[2] != head_dim:
        raise ValueError(
            f"layer {layer.name!r}: expected queries of {num_kv_heads} * n heads of {head_dim}, got {q.shape[1:]}"
        )
    return num_kv_heads


__all__ = ["attend_kv", "kv_schedule", "write_kv"]
