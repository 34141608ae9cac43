"""DeepSeek V4's compressor: keeps the states of the last tokens, and writes an entry where enough have come.

Flow:    KV and scores of new tokens -> [make_entries] -> CompressorOutput -> norm, rotation -> [write_entries] -> pages
Source:  pallas_kernels.compressor_update, pallas_kernels.latent_write

States and entries may lie in pages of one array, so the first are stored before the second are written. On a mesh every
device holds all of both and does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from kvjax.device.layers.entry_formats import entry_format
from kvjax.device.layers.layer_step import WHOLE, LayerStep
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.compressor_update import CompressorOutput, compressor_update
from pallas_kernels.latent_write import latent_write

# (entries float32[N, dim], int32[N] position of the first token of each, -1: padding) -> [N, dim], normed and rotated
FinishEntries: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def make_entries(
    entries: LayerStep,
    states: LayerStep,
    kv: jax.Array,  # [T, coff * dim]
    scores: jax.Array,  # [T, coff * dim]
    position_bias: jax.Array,  # float32[tokens_per_state, coff * dim]
) -> CompressorOutput:
    """The entries that the step completes, and the pages of the states.

    Raises:
        ValueError: shapes are not those of both specs.
    """
    overlap = _overlaps(entries, states, kv, position_bias)

    def update(kv, scores, bias, pages, tables, slot_mapping):  # type: ignore[no-untyped-def]
        step = (*tables, slot_mapping)
        sizes: dict[str, Any] = {"overlap": overlap, "page_size": states.page_size, "backend": states.backend}
        return compressor_update(kv, scores, pages, *step, position_bias=bias, **sizes)

    update_on_each = states.per_device(update, WHOLE, WHOLE)
    arguments = (kv, scores, position_bias, states.pages, states.tables, states.group.slot_mapping)
    made: CompressorOutput = update_on_each(*arguments)
    return made


def check_entries(layer: LayerStep, made: CompressorOutput, vectors: jax.Array) -> None:
    """Raises ValueError unless `vectors` are as many as the entries made, and such as the layer's pages hold."""
    if vectors.ndim != 2 or vectors.shape[0] != made.entries.shape[0]:
        raise ValueError(
            f"layer {layer.name!r}: expected finish to give {made.entries.shape[0]} vectors, got {vectors.shape}"
        )
    entry_format(layer, vectors.shape[1])


def write_entries(layer: LayerStep, vectors: jax.Array) -> Column:
    """The pages with the step's entries, `vectors` [N, dim], in them."""
    entries, compressed = entry_format(layer, vectors.shape[1]), layer.group.compressed
    assert compressed is not None  # `make_entries` asked the spec

    def write(vectors, pages, slots):  # type: ignore[no-untyped-def]
        return latent_write(vectors, pages, slots, entries=entries, page_size=layer.page_size, backend=layer.backend)

    slots = compressed.slot_mappings[layer.spec.tokens_per_state]
    pages: Column = layer.per_device(write, WHOLE, WHOLE)(vectors, layer.pages, slots)
    return pages


def _overlaps(entries: LayerStep, states: LayerStep, kv: jax.Array, position_bias: jax.Array) -> bool:
    """Whether an entry reads the tokens of the one before too: as long as the states' window is."""
    ratio, width = position_bias.shape
    if entries.spec.tokens_per_state != ratio or ratio == 1:
        raise ValueError(
            f"layer {entries.name!r}: expected a position_bias of {entries.spec.tokens_per_state} > 1 rows, one for "
            f"each token of an entry, got {ratio}"
        )
    if states.spec.entry_shapes != ((2 * width,),) or kv.shape[-1] != width:
        raise ValueError(
            f"layer {states.name!r}: expected KV and scores that make states of {states.spec.entry_shapes}, got "
            f"{kv.shape[-1]} and a position_bias of {width} numbers"
        )
    window = getattr(states.spec, "sliding_window", None)
    if window not in (ratio, 2 * ratio):
        raise ValueError(
            f"layer {states.name!r}: expected states of the last {ratio} or {2 * ratio} tokens, got {window}"
        )
    return window == 2 * ratio


__all__ = ["FinishEntries", "check_entries", "make_entries", "write_entries"]
