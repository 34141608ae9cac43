"""EasyDeL's cache groups as kvjax's: one pool of ids, a group a group; pages are EasyDeL's own affair.

Flow:    CacheGroupSpec, ... -> [translate_groups] -> kvjax.core.KVCacheConfig
Source:  EasyDeL 0.3.0, easydel/inference/esurge/core/interface.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec
from kvjax.errors import UnknownStackError

_HEADS = ("page_size", "num_kv_heads", "head_size", "dtype", "use_mla")
# Class -> its fields in EasyDeL 0.3.0, and what it is here. MLA halves the bytes of a page, not its tokens.
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any], KVCacheSpec]]] = {
    "FullAttentionSpec": (
        (*_HEADS, "sliding_window", "attention_chunk_size"),
        lambda spec: FullAttentionSpec(**_heads(spec)),
    ),
    "SlidingWindowSpec": (
        (*_HEADS, "sliding_window"),
        lambda spec: SlidingWindowSpec(**_heads(spec), sliding_window=spec.sliding_window),
    ),
    "ChunkedLocalAttentionSpec": (
        (*_HEADS, "attention_chunk_size"),
        lambda spec: ChunkedLocalAttentionSpec(**_heads(spec), attention_chunk_size=spec.attention_chunk_size),
    ),
}


def translate_groups(groups: Sequence[Any], num_blocks: int) -> KVCacheConfig:
    """The groups over one pool of `num_blocks` ids.

    Raises:
        UnknownStackError: a spec has other fields than in the recorded version; the message names one.
        NotImplementedError: a kind has no counterpart.
        ValueError: there are no groups, or fewer than two blocks.
    """
    translated = []
    for number, group in enumerate(groups):
        names = group.layer_names or (f"group.{number}",)
        translated.append(KVCacheGroupSpec(tuple(map(str, names)), _translate(group.kv_cache_spec)))
    return KVCacheConfig((KVCachePoolSpec(num_blocks),), tuple(translated))


def _translate(spec: Any) -> KVCacheSpec:
    name = type(spec).__name__
    if name not in KINDS:
        raise NotImplementedError(f"expected one of {', '.join(KINDS)}, got {name}: EasyDeL caches no prefix of it")
    wanted, make = KINDS[name]
    found = tuple(field.name for field in dataclasses.fields(spec))
    for one in (*wanted, *found):
        if one not in found or one not in wanted:
            is_what = "lacks the field" if one in wanted else "has a new field"
            raise UnknownStackError(f"expected easydel 0.3.0, got another version: {name} {is_what} {one!r}")
    return make(spec)


def _heads(spec: Any) -> dict[str, Any]:
    return {
        "block_size": spec.page_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": np.dtype(spec.dtype).name,
    }
