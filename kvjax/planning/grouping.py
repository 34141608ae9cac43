"""Which layers share a block table (a group), and which groups share a space of block ids (a pool).

Flow:    {layer name: KVCacheSpec} -> [group_layers] -> LayerGroup list -> sizing
Source:  grouping rule of vLLM v1/core/kv_cache_utils.py; ARCHITECTURE.md, "Pools on typed arrays"

Layers are bucketed by what a table of theirs would hold (`KVCacheSpec.table_key`). An array has one page shape and
dtype, and layer i of a group lies in column i, so buckets of one page layout share the pool of that layout:

    group_size = shortest bucket, or the longest if that is less than 1.5 times the shortest
    a bucket of n layers gives ceil(n / group_size) groups; group g holds its layers g, g + num_groups, ...

All groups of a pool draw ids from one free list; a group shorter than the pool's columns uses the leading ones, so
pages never collide. Splitting a long bucket is what makes groups about equally wide, so that an id costs the same
bytes whoever takes it.

A bucket of several layouts stays whole. It leads with the layers of one layout and joins that layout's pool; the other
buckets there are then split by the number of those layers. If its ids would cost 1.5 times what some group needs, it
has a pool of its own instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvjax.core.spec import KVCacheSpec, cdiv
from kvjax.planning.spec_rules import promoted_layers
from pallas_kernels.layouts import PageLayout

MAX_PADDING_RATIO = 1.5  # below it, padding short buckets with unused columns costs less than more tables
MASK_FIELDS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one block table, before pools have sizes."""

    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...]
    pool_id: int

    @property
    def spec(self) -> KVCacheSpec:
        """Spec of the table: the first layer's, without a mask in which the layers differ."""
        first = self.layer_specs[0]
        masks = [name for name in MASK_FIELDS if name in first.layer_fields]
        mixed: dict[str, Any] = {
            name: None for name in masks if len({getattr(spec, name) for spec in self.layer_specs}) > 1
        }
        return replace(first, **mixed)


@dataclass(frozen=True)
class _Layer:
    name: str
    spec: KVCacheSpec
    layout: PageLayout


@dataclass(frozen=True)
class _Pool:
    """Buckets that draw ids from one free list, and the most layers of a group (None: by the rule above)."""

    buckets: list[list[_Layer]]
    group_size: int | None = None

    @property
    def layer_names(self) -> list[str]:
        return [layer.name for bucket in self.buckets for layer in bucket]

    def groups(self) -> list[list[_Layer]]:
        """The buckets, split; one of several layouts is never longer than `group_size`."""
        group_size = self.group_size or _group_size([len(bucket) for bucket in self.buckets])
        groups = []
        for bucket in self.buckets:
            num_groups = 1 if _is_mixed(bucket) else cdiv(len(bucket), group_size)
            groups += [bucket[g::num_groups] for g in range(num_groups)]
        return groups


def group_layers(
    specs: Mapping[str, KVCacheSpec], *, platform: str, hybrid: bool = True, group_size: int | None = None
) -> list[LayerGroup]:
    """Groups pool by pool, pools in order of their first layers; of at most `group_size` layers, if that is given.

    With `hybrid` false, windowed and chunked layers keep every token (see `promoted_layers`) and share the full
    layers' table.

    Raises:
        ValueError: `specs` is empty.
    """
    if not specs:
        raise ValueError("expected the spec of at least one layer, got none; name the layers that have a cache")
    buckets: dict[Hashable, list[_Layer]] = {}
    for name, spec in (specs if hybrid else promoted_layers(specs)).items():
        buckets.setdefault(spec.table_key, []).append(_Layer(name, spec, spec.page_layout(platform)))
    place = {name: place for place, name in enumerate(specs)}
    pools = sorted(
        _pools(list(buckets.values()), group_size), key=lambda pool: min(place[name] for name in pool.layer_names)
    )
    return [
        LayerGroup(tuple(layer.name for layer in group), tuple(layer.spec for layer in group), pool_id)
        for pool_id, pool in enumerate(pools)
        for group in pool.groups()
    ]


def _pools(buckets: list[list[_Layer]], group_size: int | None) -> list[_Pool]:
    by_layout: dict[PageLayout, _Pool] = {}
    for bucket in buckets:
        if not _is_mixed(bucket):
            by_layout.setdefault(bucket[0].layout, _Pool([], group_size)).buckets.append(bucket)
    own: list[_Pool] = []
    for bucket in filter(_is_mixed, buckets):
        host = next((layout for layout, pool in by_layout.items() if _can_join(bucket, layout, pool)), None)
        if host is None:
            own.append(_Pool([bucket]))
        else:
            leading = sorted(bucket, key=lambda layer: layer.layout != host)
            size = sum(layer.layout == host for layer in bucket)
            by_layout[host] = _Pool([leading, *by_layout[host].buckets], size)
    return [*by_layout.values(), *own]


def _can_join(bucket: list[_Layer], layout: PageLayout, pool: _Pool) -> bool:
    """Whether groups of `pool`, split by the bucket's layers of its layout, use most of the pages of an id."""
    size = sum(layer.layout == layout for layer in bucket)
    if not size or pool.group_size is not None:
        return False
    narrowest = min(len(other) // cdiv(len(other), size) for other in pool.buckets)
    bytes_per_block = sum(layer.layout.page_bytes for layer in bucket)
    return bytes_per_block < MAX_PADDING_RATIO * narrowest * layout.page_bytes


def _is_mixed(bucket: list[_Layer]) -> bool:
    return any(layer.layout != bucket[0].layout for layer in bucket)


def _group_size(bucket_sizes: list[int]) -> int:
    shortest, longest = min(bucket_sizes), max(bucket_sizes)
    return longest if longest < MAX_PADDING_RATIO * shortest else shortest
