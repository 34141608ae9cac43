"""DeepSeek V4's attention: an indexer picks entries of several tokens, attended to beside a window of latents.

Flow:    index queries + LayerStep -> [pick_entries] -> indices -> [attend_compressed] -> outputs, pages of the window
         index queries and keys + LayerStep -> [pick_tokens] -> indices -> latent_attention.attend_picked (V3.2)
Source:  pallas_kernels.indexer_topk, pallas_kernels.sparse_mla_attention

Window and entries may lie in pages of one array. It is then read once the window is written: XLA would copy an array
that is read as it was before. On a mesh query heads are split. Latents, entries, the indexer's queries and what it
picks are whole on every device.
"""

from __future__ import annotations

from typing import Any

import jax

from kvjax.device.inputs.batch import Array
from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.entry_formats import entry_format
from kvjax.device.layers.layer_step import WHOLE, LayerStep
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.latent_write import latent_write
from pallas_kernels.sparse_mla_attention import SparseSchedule, plan, plan_work, sparse_mla_attention

_NOT_TAKEN = ("attention_chunk_size", "soft_cap", "k_scale", "v_scale")


def pick_entries(
    layer: LayerStep,
    q: jax.Array,  # [T, num_index_heads, index_dim]
    weights: jax.Array,  # [T, num_index_heads]
    topk: int,
) -> jax.Array:
    """int32[T, topk]: the entries of the highest scores, -1 after the last.

    Raises:
        ValueError: shapes are not the spec's.
        NotImplementedError: the layer's pages do not hold entries of several tokens.
    """
    _check_entries(layer)
    best = _best(layer, q, topk)
    picked: jax.Array = layer.per_device(best, WHOLE, WHOLE)(q, weights, layer.pages, layer.entry_tables)
    return picked


def pick_tokens(
    layer: LayerStep,
    q: jax.Array,  # [T, num_index_heads, index_dim]
    weights: jax.Array,  # [T, num_index_heads]
    keys: jax.Array,  # [T, index_dim]
    topk: int,
) -> tuple[jax.Array, Column]:
    """int32[T, topk], the tokens of the highest scores and -1 after the last; and the pages, after `keys` are written.

    Raises:
        ValueError: shapes are not the spec's.
        NotImplementedError: the pages do not hold a key for every token, or context ranks share the tokens.
    """
    if layer.spec.tokens_per_state != 1:
        raise NotImplementedError(
            f"layer {layer.name!r}: expected a cache of a key for each token, got one for {layer.spec.tokens_per_state}"
        )
    layer.check_no_context("picks of an indexer")
    best, entries = _best(layer, q, topk), entry_format(layer, q.shape[-1])

    def pick(q, weights, keys, pages, slot_mapping, tables):  # type: ignore[no-untyped-def]
        sizes: dict[str, Any] = {"entries": entries, "page_size": layer.page_size}
        pages = latent_write(keys, pages, slot_mapping, **sizes, backend=layer.backend)
        return best(q, weights, pages, tables), pages

    rows = layer.by_rank
    pick_on_each = layer.per_device(pick, (rows, rows, rows, layer.page_specs, rows, rows), (rows, layer.page_specs))
    picked, pages = pick_on_each(q, weights, keys, layer.pages, layer.group.slot_mapping, layer.tables)
    return picked, pages


def _best(layer: LayerStep, q: jax.Array, topk: int) -> Any:
    """The op on queries, weights, pages and tables, with the sizes of the layer's pages."""
    entries = entry_format(layer, q.shape[-1])

    def best(q, weights, pages, tables):  # type: ignore[no-untyped-def]
        return indexer_topk(
            q,
            weights,
            pages,
            *tables,
            topk=topk,
            tokens_per_state=layer.spec.tokens_per_state,
            entries=entries,
            page_size=layer.page_size,
            backend=layer.backend,
        )

    return best


def _window_schedule(layer: LayerStep, num_tokens: int, sliding_window: int) -> SparseSchedule:
    """What all layers of the group with this window share in the step."""

    def make() -> SparseSchedule:
        return plan(*layer.tables, num_tokens=num_tokens, sliding_window=sliding_window, page_size=layer.page_size)

    return layer.planned(("window", num_tokens, sliding_window), make)


def _work(
    window: LayerStep, compressed: LayerStep | None, q: jax.Array, schedule: SparseSchedule, num_picks: int | None
) -> Any:
    """What the layers of the group that see such entries share in the step, on each device alike."""
    own = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // window.placement.num_shards, q.shape[2]), q.dtype)
    of_entries: dict[str, Any] = {}
    if compressed is not None:
        of_entries = {
            "compressed_pages": compressed.pages,
            "compressed_tables": compressed.group.block_tables,
            "tokens_per_state": compressed.spec.tokens_per_state,
            "compressed_page_size": compressed.page_size,
            "num_picks": num_picks,
        }

    def make() -> Any:
        entries = entry_format(window, q.shape[-1])
        return plan_work(own, window.pages, schedule, **of_entries, entries=entries, backend=window.backend)

    seen = window if compressed is None else compressed
    return seen.planned(("work", id(schedule), own.shape, q.dtype.name, num_picks), make)  # one schedule a window


def check_window(layer: LayerStep, q: jax.Array, options: AttentionOptions) -> None:
    """Raises ValueError unless the layer's window, its heads and the options are such as the op takes."""
    layer.check_visible(options)
    given = [name for name in _NOT_TAKEN if getattr(options, name) is not None]
    given += ["num_sink_tokens"] * (options.num_sink_tokens > 0)
    if options.sliding_window is None or given:
        raise ValueError(
            f"layer {layer.name!r}: expected sliding_window and of the other options only sm_scale and sinks, got "
            f"sliding_window={options.sliding_window} and {given}"
        )
    layer.check_query_heads(q.shape[1])


def attend_compressed(
    window: LayerStep,
    compressed: LayerStep | None,  # None: the layer has its window only
    q: jax.Array,  # [T, num_q_heads, dim]
    kv: jax.Array,  # [T, dim]
    options: AttentionOptions,
    indices: jax.Array | None,  # int32[T, K] of entries, -1: none; None: all
) -> tuple[jax.Array, Column]:
    """[T, num_q_heads, dim] and the pages of the window, into which `kv` is written first.

    Raises:
        ValueError: shapes are not those of the specs.
        NotImplementedError: the layers' pages do not hold latents, or entries of several tokens.
    """
    entries, sliding_window = entry_format(window, q.shape[-1]), options.sliding_window
    assert sliding_window is not None  # `check_window` comes first
    window_sizes: dict[str, Any] = {"entries": entries, "page_size": window.page_size}
    is_one_array = compressed is not None and compressed.place == window.place
    if compressed is not None:
        _check_entries(compressed)
        if entry_format(compressed, q.shape[-1]) != entries:
            raise ValueError(f"layers {window.name!r} and {compressed.name!r}: expected entries of one format")

    def attend(q, kv, pages, slot_mapping, tables, planned, sinks, compressed_pages, entry_tables, indices):  # type: ignore[no-untyped-def]
        pages = latent_write(kv, pages, slot_mapping, **window_sizes, backend=window.backend)
        result = sparse_mla_attention(
            q,
            pages,
            *tables,
            compressed_pages=pages if is_one_array else compressed_pages,
            compressed_tables=entry_tables,
            tokens_per_state=None if compressed is None else compressed.spec.tokens_per_state,
            topk_indices=indices,
            sm_scale=options.sm_scale,
            sliding_window=sliding_window,
            sinks=sinks,
            schedule=planned[0],
            work=planned[1],
            **window_sizes,
            compressed_page_size=None if compressed is None else compressed.page_size,
            backend=window.backend,
        )
        return result.out, pages

    heads, sinks = window.heads(3, 1), window.per_head(options.sinks)
    in_specs = (heads, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, sinks, WHOLE, WHOLE, WHOLE)
    attend_on_each = window.per_device(attend, in_specs, (heads, WHOLE))
    arrays: tuple[Column | None, Array | None] = (None, None)
    if compressed is not None:
        arrays = (None if is_one_array else compressed.pages, compressed.group.block_tables)
    schedule = _window_schedule(window, q.shape[0], sliding_window)
    work = _work(window, compressed, q, schedule, None if indices is None else indices.shape[1])
    of_window = (window.pages, window.group.slot_mapping, window.tables, (schedule, work), options.sinks)
    out, pages = attend_on_each(q, kv, *of_window, *arrays, indices)
    return out, pages


def _check_entries(layer: LayerStep) -> None:
    if layer.spec.tokens_per_state == 1:
        raise NotImplementedError(
            f"layer {layer.name!r}: expected a cache of entries of several tokens, got {layer.spec.kind}"
        )


__all__ = ["attend_compressed", "check_window", "pick_entries", "pick_tokens"]
