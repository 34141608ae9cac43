"""Multi-head latent attention, absorbed: the step's latents are written into the layer's pages, then queries attend.

Flow:    absorbed queries, latents, rotated keys of a layer + LayerStep -> [attend_latent] -> outputs, the layer's pages
         the same and picks of an indexer -> [attend_picked] -> the same
Source:  pallas_kernels.mla_paged_attention, pallas_kernels.sparse_mla_attention

One entry [latent | rotated key] of a token serves all query heads. So on a mesh every tensor rank holds all latents,
writes the same, and attends with its own query heads; context ranks share the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.entry_formats import entry_format
from kvjax.device.layers.layer_step import WHOLE, LayerStep
from kvjax.device.mesh import context_ranks
from kvjax.device.pages.kv_pages import Column
from pallas_kernels import sparse_mla_attention as sparse
from pallas_kernels.latent_write import latent_write
from pallas_kernels.mla_paged_attention import mla_paged_attention, plan
from pallas_kernels.ragged_paged_attention import MaskRule


def attend_latent(
    layer: LayerStep,
    q_nope: jax.Array,  # [T, num_q_heads, latent_dim] queries times the key projection of their head
    q_pe: jax.Array,  # [T, num_q_heads, rope_dim]
    latent: jax.Array | None,  # [T, latent_dim]; None: the pages hold the latents already
    key_pe: jax.Array | None,  # [T, rope_dim], likewise
    options: AttentionOptions,
) -> tuple[jax.Array, Column]:
    """[T, num_q_heads, latent_dim] and the pages.

    Raises:
        ValueError: shapes are not the spec's, the options look further back than the layer's group keeps, or have a
            scale of V.
        NotImplementedError: the layer's pages do not hold a latent for every token.
    """
    _check(layer, q_nope, q_pe, latent, key_pe)
    layer.check_visible(options)
    if options.v_scale is not None:
        raise ValueError(f"layer {layer.name!r}: a latent is key and value; expected k_scale alone, got v_scale")
    per_head = {"sinks": options.sinks, "k_scale": options.k_scale}

    schedule = _schedule(layer, q_nope, q_pe, options)

    def attend(q_nope, q_pe, new, pages, per_head, tables, slot_mapping, schedule):  # type: ignore[no-untyped-def]
        op = partial(
            mla_paged_attention,
            q_nope,
            q_pe,
            pages,
            *tables,
            new_kv=new,
            sm_scale=options.sm_scale,
            sliding_window=options.sliding_window,
            attention_chunk_size=options.attention_chunk_size,
            num_sink_tokens=options.num_sink_tokens,
            soft_cap=options.soft_cap,
            schedule=schedule,
            page_size=layer.page_size // layer.placement.num_context,
            backend=layer.backend,
            k_scale=per_head["k_scale"],
        )
        slot_mapping = None if new is None else slot_mapping
        result = context_ranks.attend(layer.placement.context_ranks, op, slot_mapping, per_head["sinks"])
        return result.out, result.pages

    heads, new = layer.heads(3, 1), None if latent is None else (latent, key_pe)
    per_head_specs = {name: layer.per_head(x) for name, x in per_head.items()}
    rows = layer.by_rank
    in_specs = (heads, heads, rows, layer.page_specs, per_head_specs, rows, rows, WHOLE)
    attend_on_each = layer.per_device(attend, in_specs, (heads, layer.page_specs))
    step = (layer.tables, layer.group.slot_mapping, schedule)
    out, pages = attend_on_each(q_nope, q_pe, new, layer.pages, per_head, *step)
    return out, pages


def attend_picked(
    layer: LayerStep,
    q_nope: jax.Array,  # [T, num_q_heads, latent_dim] queries times the key projection of their head
    q_pe: jax.Array,  # [T, num_q_heads, rope_dim]
    latent: jax.Array | None,  # [T, latent_dim]; None: the pages hold the latents already
    key_pe: jax.Array | None,  # [T, rope_dim], likewise
    options: AttentionOptions,
    picks: jax.Array,  # int32[T, K] tokens of its request that each sees, -1: none
) -> tuple[jax.Array, Column]:
    """[T, num_q_heads, latent_dim] and the pages.

    A whole entry is taken as key and value; what comes of its rotated part is left out.

    Raises:
        ValueError: shapes are not the spec's, or the options have more than `sm_scale`.
        NotImplementedError: the pages do not hold a latent for every token, or context ranks share the tokens.
    """
    _check(layer, q_nope, q_pe, latent, key_pe)
    if options != AttentionOptions(sm_scale=options.sm_scale):
        raise ValueError(f"layer {layer.name!r}: expected sm_scale alone where tokens are picked, got {options}")
    num_tokens, latent_dim = q_nope.shape[0], q_nope.shape[-1]
    if picks.ndim != 2 or picks.shape[0] != num_tokens or picks.dtype != jnp.int32:
        raise ValueError(
            f"layer {layer.name!r}: expected picks int32[{num_tokens}, K], got {picks.dtype}{list(picks.shape)}"
        )
    layer.check_no_context("picks of an indexer")
    sizes: dict[str, Any] = {
        "entries": entry_format(layer, latent_dim + q_pe.shape[-1]),
        "page_size": layer.page_size,
    }
    schedule = None
    if layer.plans_for_all:
        windows: dict[str, Any] = {"sliding_window": 0, "page_size": layer.page_size}
        schedule = layer.planned(
            ("picked", num_tokens), lambda: sparse.plan(*layer.tables, num_tokens=num_tokens, **windows)
        )

    def attend(q, new, pages, tables, slot_mapping, picks, schedule):  # type: ignore[no-untyped-def]
        if new is not None:
            pages = latent_write(new, pages, slot_mapping, **sizes, backend=layer.backend)
        result = sparse.sparse_mla_attention(
            q,
            pages,
            *tables,
            compressed_pages=pages,
            compressed_tables=tables[0],
            compressed_page_size=layer.page_size,
            tokens_per_state=1,
            topk_indices=picks,
            sm_scale=options.sm_scale,
            sliding_window=0,
            schedule=schedule,
            **sizes,
            backend=layer.backend,
        )
        return result.out[..., :latent_dim], pages

    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    new = None if latent is None or key_pe is None else jnp.concatenate([latent, key_pe], axis=-1)
    heads, rows = layer.heads(3, 1), layer.by_rank
    in_specs = (heads, rows, layer.page_specs, rows, rows, rows, WHOLE)
    attend_on_each = layer.per_device(attend, in_specs, (heads, layer.page_specs))
    out, pages = attend_on_each(q, new, layer.pages, layer.tables, layer.group.slot_mapping, picks, schedule)
    return out, pages


def _schedule(layer: LayerStep, q_nope: jax.Array, q_pe: jax.Array, options: AttentionOptions) -> Any:
    """The plan of the step for the layers of the group with such queries and mask, on each device alike."""
    num_shards = layer.placement.num_shards
    if not layer.plans_for_all:
        return None
    own_nope, own_pe = (
        jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // num_shards, q.shape[2]), q.dtype) for q in (q_nope, q_pe)
    )
    mask = MaskRule(True, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)

    def make() -> Any:
        sizes: dict[str, Any] = {"page_size": layer.page_size, "is_decode": layer.batch.is_decode}
        return plan(own_nope, own_pe, layer.pages, *layer.tables, mask=mask, **sizes, backend=layer.backend)

    of_queries = (own_nope.shape, own_pe.shape, q_nope.dtype.name)
    of_pages = tuple((array.shape, array.dtype.name) for array in layer.pages)
    return layer.planned(("latent", of_queries, of_pages, mask), make)


def _check(
    layer: LayerStep, q_nope: jax.Array, q_pe: jax.Array, latent: jax.Array | None, key_pe: jax.Array | None
) -> None:
    shapes, ratio = layer.spec.entry_shapes, layer.spec.tokens_per_state
    if len(shapes) != 1 or ratio != 1:
        raise NotImplementedError(
            f"layer {layer.name!r}: expected a cache of a latent for each token, got {layer.spec.kind} with an entry "
            f"of {shapes} for {ratio}"
        )
    dims = (q_nope.shape[-1], q_pe.shape[-1])
    if sum(dims) != shapes[0][0]:
        raise ValueError(f"layer {layer.name!r}: expected queries of {shapes[0][0]} numbers in two parts, got {dims}")
    layer.check_query_heads(q_nope.shape[1])
    if latent is not None and key_pe is not None and (latent.shape[-1], key_pe.shape[-1]) != dims:
        raise ValueError(
            f"layer {layer.name!r}: expected a latent and a rotated key of {dims} numbers as the queries, got "
            f"{latent.shape[-1]} and {key_pe.shape[-1]}"
        )


__all__ = ["attend_latent", "attend_picked"]
