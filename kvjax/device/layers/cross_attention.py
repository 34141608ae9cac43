"""Cross attention: queries of the decoder over what the encoder's program wrote, all of it, whatever their position.

Flow:    q of a layer + LayerStep -> [attend_cross] -> attention outputs
Source:  pallas_kernels.ragged_paged_attention with causal=False; lengths are those of the encoder's tokens
"""

from __future__ import annotations

from functools import partial

import jax

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.kv_attention import kv_schedule
from kvjax.device.layers.layer_step import WHOLE, LayerStep
from kvjax.device.mesh import context_ranks
from pallas_kernels.ragged_paged_attention import MaskRule, ragged_paged_attention


def attend_cross(
    layer: LayerStep,
    q: jax.Array,  # [T, num_q_heads, head_dim]
    options: AttentionOptions,
) -> jax.Array:  # [T, num_q_heads, head_dim_v]
    """What every query reads of all encoder tokens of its request; each device attends with its own heads.

    Raises:
        ValueError: queries are not of the layer's heads, or the options have a mask.
        NotImplementedError: the layer's pages do not hold an encoder's K and V.
    """
    num_kv_heads = _check(layer, q, options)
    per_head = {"sinks": options.sinks, "k_scale": options.k_scale, "v_scale": options.v_scale}

    schedule = kv_schedule(layer, q, num_kv_heads, MaskRule(causal=False))

    def attend(q, pages, per_head, tables, schedule):  # type: ignore[no-untyped-def]
        op = partial(
            ragged_paged_attention,
            q,
            pages,
            *tables,
            causal=False,
            sm_scale=options.sm_scale,
            soft_cap=options.soft_cap,
            schedule=schedule,
            num_kv_heads=num_kv_heads // layer.placement.num_shards,
            backend=layer.backend,
            k_scale=per_head["k_scale"],
            v_scale=per_head["v_scale"],
        )
        return context_ranks.attend(layer.placement.context_ranks, op, None, per_head["sinks"]).out

    heads, page_specs = layer.heads(3, 1), layer.page_specs
    per_head_specs = {name: layer.per_head(x) for name, x in per_head.items()}
    attend_on_each = layer.per_device(attend, (heads, page_specs, per_head_specs, WHOLE, WHOLE), heads)
    out: jax.Array = attend_on_each(q, layer.pages, per_head, layer.tables, schedule)
    return out


def _check(layer: LayerStep, q: jax.Array, options: AttentionOptions) -> int:
    """KV heads of the layer."""
    if not layer.spec.reads_encoder:
        raise NotImplementedError(f"layer {layer.name!r}: expected a cache of encoder tokens, got {layer.spec.kind}")
    num_kv_heads, head_dim = layer.spec.entry_shapes[0]
    if q.shape[1] % num_kv_heads or q.shape[2] != head_dim:
        raise ValueError(
            f"layer {layer.name!r}: expected queries of {num_kv_heads} * n heads of {head_dim}, got {q.shape[1:]}"
        )
    bounds = (options.sliding_window, options.attention_chunk_size)
    if bounds != (None, None) or options.num_sink_tokens or options.sees_prompt:
        raise ValueError(f"layer {layer.name!r}: expected options without a mask, since every encoder token is seen")
    return num_kv_heads


__all__ = ["attend_cross"]
