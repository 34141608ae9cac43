"""Four questions that the planner asks a spec; a new attention kind registers its answer where the default is wrong.

Flow:    KVCacheSpec -> [promoted | per_device | replicated | table_key] -> KVCacheSpec
Source:  promotion and merging of specs: vLLM v1/kv_cache_interface.py; head replication: its tensor parallelism
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import AttentionSpec, KVCacheSpec


@singledispatch
def promoted(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec with which a layer keeps every token and masks what it must not see; itself where it does already."""
    return spec


@promoted.register
def _(spec: SlidingWindowSpec) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        sliding_window=spec.sliding_window,
    )


@promoted.register
def _(spec: ChunkedLocalAttentionSpec) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        attention_chunk_size=spec.attention_chunk_size,
    )


@promoted.register
def _(spec: SlidingWindowMLASpec) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=spec.block_size,
        head_size=spec.head_size,
        dtype=spec.dtype,
        tokens_per_state=spec.tokens_per_state,
        page_alignment=spec.page_alignment,
        cache_role=spec.cache_role,
        sliding_window=spec.sliding_window,
    )


@singledispatch
def per_device(spec: KVCacheSpec, tensor_parallel: int) -> KVCacheSpec:
    """What one of `tensor_parallel` devices holds of a layer; by default all of it."""
    return spec


@per_device.register
def _(spec: AttentionSpec, tensor_parallel: int) -> KVCacheSpec:
    """KV heads are split over the devices; with more devices than heads each head lies on several.

    Raises:
        ValueError: neither number divides the other.
    """
    heads = spec.num_kv_heads
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ValueError(
            f"expected tensor_parallel to divide the {heads} KV heads or to be a multiple of them, "
            f"got {tensor_parallel}"
        )
    return replace(spec, num_kv_heads=max(heads // tensor_parallel, 1))


@singledispatch
def replicated(spec: KVCacheSpec, tensor_parallel: int) -> KVCacheSpec:
    """The spec of all devices' shares together, which is more than the layer has where heads are replicated."""
    return spec


@replicated.register
def _(spec: AttentionSpec, tensor_parallel: int) -> KVCacheSpec:
    return replace(spec, num_kv_heads=max(spec.num_kv_heads, tensor_parallel))


@singledispatch
def table_key(spec: KVCacheSpec) -> KVCacheSpec:
    """Layers of equal keys hold the same blocks of a request, so one table serves them; by default the spec itself."""
    return spec


@table_key.register
def _(spec: FullAttentionSpec) -> KVCacheSpec:
    """Masks change what a layer reads, not what it keeps."""
    return replace(spec, sliding_window=None, attention_chunk_size=None)


@table_key.register
def _(spec: MLAAttentionSpec) -> KVCacheSpec:
    """Likewise."""
    return replace(spec, sliding_window=None)
