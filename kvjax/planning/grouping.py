"""Which layers share a block table (a group), and which groups share a space of block ids (a pool).

Flow:    {layer name: KVCacheSpec} -> [group_layers] -> LayerGroup list -> sizing
Source:  grouping rule of vLLM v1/core/kv_cache_utils.py; pools on typed arrays: ARCHITECTURE.md, "Planning"

Layers are bucketed twice. By page layout: an array has one page shape and dtype, so only layers of equal layout can
lie in one column, and each layout makes one pool. Inside a pool by what a layer keeps of a request:

    group_size = shortest bucket, or the longest if that is less than 1.5 times the shortest
    a bucket of n layers gives ceil(n / group_size) groups; group g holds its layers g, g + num_groups, ...

All groups of a pool draw ids from one free list, and layer i of each lies in column i, so their pages never collide;
a group shorter than the pool's columns uses the leading ones. Splitting a long bucket is what makes groups about
equally wide, so that an id costs the same bytes whoever takes it; a layout with one bucket is never split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvjax.core.spec import KVCacheSpec, cdiv
from kvjax.planning.spec_rules import promoted, table_key
from pallas_kernels.layouts import PageLayout

MAX_PADDING_RATIO = 1.5  # below it, padding short buckets with unused columns costs less than more tables


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one block table, before pools have sizes."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pool_id: int


def group_layers(specs: Mapping[str, KVCacheSpec], *, platform: str, hybrid: bool = True) -> list[LayerGroup]:
    """Groups in the order of their first layers' buckets, pools numbered in order of appearance.

    With `hybrid` false, windowed and chunked layers keep every token (see `promoted`) and share the full layers'
    table.

    Raises:
        ValueError: `specs` is empty.
    """
    if not specs:
        raise ValueError("expected the spec of at least one layer, got none; name the layers that have a cache")
    chosen = specs if hybrid else {name: promoted(spec) for name, spec in specs.items()}
    groups: list[LayerGroup] = []
    for pool_id, names in enumerate(_by_layout(chosen, platform).values()):
        buckets = _by_table({name: chosen[name] for name in names})
        group_size = _group_size([len(bucket) for bucket in buckets])
        for bucket in buckets:
            num_groups = cdiv(len(bucket), group_size)
            spec = _shared_spec([chosen[name] for name in bucket])
            groups += [LayerGroup(tuple(bucket[g::num_groups]), spec, pool_id) for g in range(num_groups)]
    return groups


def _by_layout(specs: Mapping[str, KVCacheSpec], platform: str) -> dict[PageLayout, list[str]]:
    layouts: dict[PageLayout, list[str]] = {}
    for name, spec in specs.items():
        layouts.setdefault(spec.page_layout(platform), []).append(name)
    return layouts


def _by_table(specs: Mapping[str, KVCacheSpec]) -> list[list[str]]:
    buckets: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault(table_key(spec), []).append(name)
    return list(buckets.values())


def _group_size(bucket_sizes: list[int]) -> int:
    shortest, longest = min(bucket_sizes), max(bucket_sizes)
    return longest if longest < MAX_PADDING_RATIO * shortest else shortest


def _shared_spec(specs: list[KVCacheSpec]) -> KVCacheSpec:
    """The layers' common spec, without the masks in which they differ."""
    return specs[0] if all(spec == specs[0] for spec in specs) else table_key(specs[0])
