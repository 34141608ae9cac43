"""Questions that the planner asks a spec; a new attention kind registers its answer where the default is wrong.

Flow:    KVCacheSpec -> [promoted | per_device | share_of_page | replicated] -> KVCacheSpec;
         [num_shards | table_columns] -> int
Source:  promotion and merging of specs: vLLM v1/kv_cache_interface.py; head replication: its tensor parallelism
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import singledispatch
from math import gcd

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import LatentWindowSpec, MLAAttentionSpec
from kvjax.core.kinds.recurrent_spec import StateArraysSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import AttentionSpec, KVCacheSpec, cdiv


@singledispatch
def promoted(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec with which a layer keeps every token and masks what it must not see; itself where it does already."""
    return spec


@promoted.register
def _(spec: SlidingWindowSpec | ChunkedLocalAttentionSpec) -> KVCacheSpec:
    return _with_fields_of(spec, FullAttentionSpec)


@promoted.register
def _(spec: LatentWindowSpec) -> KVCacheSpec:
    return _with_fields_of(spec, MLAAttentionSpec)


def _with_fields_of(spec: KVCacheSpec, kind: type[KVCacheSpec]) -> KVCacheSpec:
    """A spec of `kind`, every field that `spec` has too as it is there."""
    return kind(**{field.name: getattr(spec, field.name) for field in fields(kind) if hasattr(spec, field.name)})


def promoted_layers(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """All layers with every token kept; promoted ones take the block size of the others of their kind, if it is one."""
    sizes: dict[type[KVCacheSpec], set[int]] = {}
    wide = {name: promoted(spec) for name, spec in specs.items()}
    for name, spec in specs.items():
        if wide[name] is spec:
            sizes.setdefault(type(spec), set()).add(spec.block_size)
    for name, spec in specs.items():
        found = sizes.get(type(wide[name]), set())
        if wide[name] is not spec and len(found) == 1:
            wide[name] = replace(wide[name], block_size=min(found))
    return wide


@singledispatch
def num_shards(spec: KVCacheSpec) -> int:
    """Most devices that tensor parallelism splits a layer's cache over; by default each holds all of it."""
    return 1


@num_shards.register
def _(spec: AttentionSpec) -> int:
    return spec.num_kv_heads


@num_shards.register
def _(spec: StateArraysSpec) -> int:
    """All arrays of a state are split along their heads or channels."""
    return gcd(*(shape[axis] for shape, axis in zip(spec.shapes, spec.split_axes, strict=True)))


@singledispatch
def per_device(spec: KVCacheSpec, tensor_parallel: int) -> KVCacheSpec:
    """What one of `tensor_parallel` devices holds of a layer; by default all of it."""
    return spec


@per_device.register
def _(spec: AttentionSpec, tensor_parallel: int) -> KVCacheSpec:
    """KV heads are split over the devices; with more devices than heads each head lies on several."""
    return replace(spec, num_kv_heads=max(spec.num_kv_heads // tensor_parallel, 1))


@per_device.register
def _(spec: StateArraysSpec, tensor_parallel: int) -> KVCacheSpec:
    parts = min(tensor_parallel, num_shards(spec))
    return replace(spec, shapes=_with_heads(spec, lambda heads: heads // parts), page_size_padded=None)


def share_of_page(spec: KVCacheSpec, num_ranks: int) -> KVCacheSpec:
    """What one of `num_ranks` context ranks that share the tokens of every page holds of a layer: of states, all."""
    return spec if spec.state_pages is not None else replace(spec, block_size=spec.block_size // num_ranks)


@singledispatch
def replicated(spec: KVCacheSpec, tensor_parallel: int) -> KVCacheSpec:
    """The spec of all devices' shares together, which is more than the layer has where heads are replicated."""
    return spec


@replicated.register
def _(spec: AttentionSpec, tensor_parallel: int) -> KVCacheSpec:
    return replace(spec, num_kv_heads=max(spec.num_kv_heads, tensor_parallel))


@replicated.register
def _(spec: StateArraysSpec, tensor_parallel: int) -> KVCacheSpec:
    copies = max(tensor_parallel // num_shards(spec), 1)
    return replace(spec, shapes=_with_heads(spec, lambda heads: heads * copies), page_size_padded=None)


def _with_heads(spec: StateArraysSpec, change: Callable[[int], int]) -> tuple[tuple[int, ...], ...]:
    """The shapes with other counts of heads."""
    places = zip(spec.shapes, spec.split_axes, strict=True)
    return tuple((*shape[:axis], change(shape[axis]), *shape[axis + 1 :]) for shape, axis in places)


@singledispatch
def table_columns(spec: KVCacheSpec, num_tokens: int, context_parallel: int) -> int:
    """Entries of a request's row in the block table; released blocks keep their (null) entries."""
    return cdiv(num_tokens, spec.block_size * context_parallel)


@table_columns.register
def _(spec: CrossAttentionSpec, num_tokens: int, context_parallel: int) -> int:
    return spec.max_blocks_per_request(num_tokens, 0)


@table_columns.register
def _(spec: StateArraysSpec, num_tokens: int, context_parallel: int) -> int:
    """Speculative blocks follow the running one; without cached states that is in the first column."""
    columns = cdiv(num_tokens, spec.block_size) if spec.mamba_cache_mode == "align" else 1
    return columns + spec.num_speculative_blocks
