"""How a layer's latent pages hold their vectors: as they are, or as bytes of fp8 with scales beside them.

Flow:    LayerStep + numbers of a vector -> [entry_format] -> ops over latent pages
Source:  pallas_kernels.latent_entries; sizes of the bytes as kvjax.models.configs.deepseek_v4 counts them

A spec says how many numbers of which dtype an entry has. In pages of int8 a vector of n numbers takes

    n + 4                        bytes: e4m3 and one float32 scale, an indexer's key
    n + rope_dim + ceil(n / 64)  bytes: e4m3 with a scale for each 64 numbers, rotary ones in bfloat16
"""

from __future__ import annotations

from kvjax.device.layers.layer_step import LayerStep
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, LatentFp8, Plain
from pallas_kernels.layouts import cdiv

_GROUP = LatentFp8().group


def entry_format(layer: LayerStep, dim: int) -> EntryFormat:
    """The format of the layer's entries, which are vectors of `dim` numbers.

    Raises:
        ValueError: the layer's pages do not hold such vectors.
        NotImplementedError: they do not hold vectors.
    """
    shapes = layer.spec.entry_shapes
    if len(shapes) != 1:
        raise NotImplementedError(f"layer {layer.name!r}: expected a cache of latents, got {layer.spec.kind}")
    (width,), dtype = shapes[0], layer.pages[0].dtype
    if dtype != "int8":
        formats: tuple[EntryFormat, ...] = (Plain(),)
    else:
        rope_dim = width - dim - cdiv(dim, _GROUP)
        formats = (IndexFp8(), LatentFp8(rope_dim=rope_dim)) if rope_dim > 0 else (IndexFp8(),)
    for entries in formats:
        if _width(entries, dim) == width:
            return entries
    raise ValueError(f"layer {layer.name!r}: expected vectors that take {width} numbers of {dtype}, got {dim} numbers")


def _width(entries: EntryFormat, dim: int) -> int | None:
    """Numbers of a vector in pages; None where the format has no such vectors."""
    try:
        return entries.width(dim)
    except ValueError:
        return None


__all__ = ["entry_format"]
