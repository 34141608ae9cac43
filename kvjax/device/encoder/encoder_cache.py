"""The cache as an encoder sees it: what it makes of one request's input is written for all cross-attention layers.

Flow:    KVPages + slots of one request's encoder tokens -> [EncoderCache] -> the updated KVPages
Source:  the layer's group and column come from KVCacheConfig.layer_index

    cache = EncoderCache(pages, slot_mappings, kv_cache_config, placement)
    module.encode(features, cache)                               # each layer: cache.write_cross("layers.3.cross", k, v)
    pages = cache.pages
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from kvjax.core.spec import KVCacheConfig
from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import KVPages
from pallas_kernels.kv_write import kv_write


def encoder_groups(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Ids of the groups whose pages an encoder writes."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(group_id for group_id, group in groups if group.kv_cache_spec.reads_encoder)


class EncoderCache:
    """Pages while the encoder runs for one request. Made inside the traced function, thrown away with the trace."""

    def __init__(
        self,
        pages: KVPages,
        slot_mappings: Mapping[int, jax.Array],  # by group id, int32[num_encoder_tokens]
        kv_cache_config: KVCacheConfig,
        placement: Placement,
        *,
        backend: str = "auto",
    ) -> None:
        self.pages = pages
        self._slot_mappings = slot_mappings
        self._config = kv_cache_config
        self._placement = placement
        self._backend = backend
        self._written: set[str] = set()

    @property
    def _layers(self) -> tuple[str, ...]:
        """Layers that attend to the encoder's tokens; those that share another's pages are not among them."""
        groups = self._config.kv_cache_groups
        return tuple(name for group_id in encoder_groups(self._config) for name in groups[group_id].layer_names)

    @property
    def unwritten_layers(self) -> tuple[str, ...]:
        """Cross-attention layers without this input's K and V; empty after a whole encoding."""
        return tuple(name for name in self._layers if name not in self._written)

    def write_cross(
        self,
        layer_name: str,
        k: jax.Array,  # [num_encoder_tokens, num_kv_heads, head_dim]
        v: jax.Array,  # [num_encoder_tokens, num_kv_heads, head_dim_v]
        *,
        k_scale: jax.Array | None = None,  # float32[] or [num_kv_heads]: pages hold K / k_scale
        v_scale: jax.Array | None = None,
    ) -> None:
        """Writes the K and V of one cross-attention layer; each device writes its own heads.

        Raises:
            ValueError: no such layer reads an encoder, it was written before, or shapes are not its spec's.
        """
        if layer_name not in self._layers:
            raise ValueError(f"expected a layer out of {self._layers}, got {layer_name!r}")
        if layer_name in self._written:
            raise ValueError(f"layer {layer_name!r} is written twice for one encoder input")
        group_id, column = self._config.layer_index[layer_name]
        group, slots = self._config.kv_cache_groups[group_id], self._slot_mappings[group_id]
        wanted = tuple((slots.shape[0], *shape) for shape in group.spec_of(column).entry_shapes)
        if (k.shape, v.shape) != wanted:
            raise ValueError(f"layer {layer_name!r}: expected K and V of {wanted}, got {k.shape} and {v.shape}")
        pages, place = self.pages.column(group.pool_id, column), self._placement
        heads = place.head_spec(3, 1)
        page_specs = self.pages.specs(group.pool_id, column)
        scale_specs = tuple(None if x is None else place.head_spec(x.ndim, 0) for x in (k_scale, v_scale))

        def write(k, v, pages, slots, k_scale, v_scale):  # type: ignore[no-untyped-def]
            own = slots if place.context_ranks is None else place.context_ranks.own_slots(slots)
            return kv_write(k, v, pages, own, k_scale=k_scale, v_scale=v_scale, backend=self._backend)

        write_on_each = place.shard_map(write, (heads, heads, page_specs, PartitionSpec(), *scale_specs), page_specs)
        arrays = write_on_each(k, v, pages, slots, k_scale, v_scale)
        self.pages = self.pages.with_column(group.pool_id, column, arrays)
        self._written.add(layer_name)


__all__ = ["EncoderCache", "encoder_groups"]
