"""vLLM's KVCacheConfig as kvjax's: one pool of ids, a group per group, a spec per spec.

Flow:    vLLM's KVCacheConfig -> [translate_config] -> kvjax.core.KVCacheConfig -> kvjax.core.KVCacheManager
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvjax.adapters.vllm.release import Release
from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.kinds.rswa import RSWASpec
from kvjax.core.kinds.sink_full import SinkFullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.kinds.unshared import ReplayedWindowMLASpec, RequestBufferSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec

BYTES = {"uint8": "int8", "float8_e4m3fnuz": "float8_e4m3fn", "float8_e5m2fnuz": "float8_e5m2"}  # by size alike


def translate_config(config: Any, release: Release, dcp_world_size: int = 1) -> KVCacheConfig:
    """The groups of a vLLM config over one pool of `config.num_blocks` ids; pages are vLLM's own affair.

    Where a release says of each group whether ranks of decode context parallelism share its tokens, a block of such a
    group has as many times the tokens; kvjax.core then knows of no ranks.

    Raises:
        UnknownStackError: an object is not of the release; the message names what is missing or new.
        NotImplementedError: a kind or field value has no counterpart.
        ValueError: there are no groups, or fewer than two blocks.
    """
    release.check_fields(config)
    groups = []
    for group in config.kv_cache_groups:
        release.check_fields(group)
        spec = translate_spec(group.kv_cache_spec, release, dcp_world_size)
        eagle = getattr(group, "is_eagle_group", False)
        groups.append(KVCacheGroupSpec(tuple(group.layer_names), spec, is_eagle_group=eagle))
    return KVCacheConfig((KVCachePoolSpec(config.num_blocks),), tuple(groups))


def translate_spec(spec: Any, release: Release, dcp_world_size: int = 1) -> KVCacheSpec:
    """One spec; raises as `translate_config`."""
    release.check_fields(spec)
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":
        return translate_spec(next(iter(spec.kv_cache_specs.values())), release, dcp_world_size)
    translate = KINDS.get(name)
    if translate is None:
        raise NotImplementedError(
            f"vllm {release.name}: no kind of kvjax.core is what {name} is; known: {', '.join(KINDS)}"
        )
    for field, value in SET_FIELDS.items():
        if getattr(spec, field, value) != value:
            raise NotImplementedError(
                f"vllm {release.name}: {name}.{field}={getattr(spec, field)!r} has no counterpart in kvjax.core"
            )
    translated = translate(spec)
    if dcp_world_size == 1 or not release.rules.shards_by_group or not spec.dcp_sharded:
        return translated
    if not translated.supports_context_parallelism:
        raise NotImplementedError(
            f"vllm {release.name}: {name}.dcp_sharded=True with dcp_world_size={dcp_world_size} has no counterpart in "
            "kvjax.core"
        )
    return replace(translated, block_size=spec.block_size * dcp_world_size)


# Fields that change which tokens a table holds, in a way that kvjax.core has not; the value that means "not".
SET_FIELDS = {"extra_retained_tokens": 0}


def _heads(spec: Any) -> dict[str, Any]:
    return {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": getattr(spec, "head_size_v", None) or None,
        "dtype": _dtype(spec.dtype),
    }


def _latent(spec: Any) -> dict[str, Any]:
    per_state: Any = getattr(spec, "compress_ratio", None) or getattr(spec, "tokens_per_state", 1)
    role = getattr(spec, "cache_role", None)
    names = {} if role is None else {"cache_role": str(getattr(role, "value", role))}
    return {
        "block_size": spec.block_size,
        "head_size": spec.head_size,
        "dtype": _dtype(spec.dtype),
        "tokens_per_state": int(per_state),
        **names,
    }


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return BYTES.get(name, name)


def _full(spec: Any) -> KVCacheSpec:
    masks = {"sliding_window": spec.sliding_window, "attention_chunk_size": spec.attention_chunk_size}
    return FullAttentionSpec(**_heads(spec), **masks)


def _rswa(spec: Any) -> KVCacheSpec:
    return RSWASpec(**_heads(spec), rswa_window=spec.rswa_window)


def _mamba(spec: Any) -> KVCacheSpec:
    if spec.mamba_cache_mode not in ("none", "align"):
        raise NotImplementedError(f"mamba_cache_mode {spec.mamba_cache_mode!r}; kvjax.core has none and align")
    return MambaSpec(
        block_size=spec.block_size,
        shapes=((1,),),  # the arrays of a state are vLLM's own; which blocks hold states does not depend on them
        dtypes=("int8",),
        mamba_cache_mode=spec.mamba_cache_mode,
        num_speculative_blocks=spec.num_speculative_blocks,
        num_prefill_checkpoint_blocks=getattr(spec, "num_prefill_checkpoint_blocks", 0),
        prefill_checkpoint_alignment=getattr(spec, "prefill_checkpoint_alignment", None),
    )


def _latent_window(spec: Any) -> KVCacheSpec:
    kind = ReplayedWindowMLASpec if getattr(spec, "bounded_replay", False) else SlidingWindowMLASpec
    return kind(**_latent(spec), sliding_window=spec.sliding_window)


def _buffer(spec: Any) -> KVCacheSpec:
    return RequestBufferSpec(block_size=spec.block_size, num_bytes=1)


KINDS: dict[str, Callable[[Any], KVCacheSpec]] = {
    "FullAttentionSpec": _full,
    "RSWASpec": _rswa,
    "CircularBufferSpec": _buffer,
    "MLAAttentionSpec": lambda spec: MLAAttentionSpec(**_latent(spec), sliding_window=spec.sliding_window),
    "SlidingWindowSpec": lambda spec: SlidingWindowSpec(**_heads(spec), sliding_window=spec.sliding_window),
    "SlidingWindowMLASpec": _latent_window,
    "ChunkedLocalAttentionSpec": lambda spec: ChunkedLocalAttentionSpec(
        **_heads(spec), attention_chunk_size=spec.attention_chunk_size
    ),
    "MambaSpec": _mamba,
    "CrossAttentionSpec": lambda spec: CrossAttentionSpec(**_heads(spec), max_num_encoder_tokens=MOST_ENCODER_TOKENS),
    "SinkFullAttentionSpec": lambda spec: SinkFullAttentionSpec(**_heads(spec), sink_len=spec.sink_len),
}


def check_retention(config: Any, given: Mapping[str, Any]) -> None:
    """Checks sparse caching as vLLM does.

    Raises:
        ValueError: the interval is no multiple of `scheduler_block_size`, or no group can do with few blocks.
    """
    interval = getattr(config, "prefix_cache_retention_interval", None)
    if not interval:
        return
    kinds = {type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups}
    if not kinds & SPARSE_KINDS:
        raise ValueError(
            f"expected prefix_cache_retention_interval=0, got {interval}: there is no sliding-window or Mamba group"
        )
    if interval < 0 or interval % given["scheduler_block_size"]:
        raise ValueError(
            "expected prefix_cache_retention_interval as a non-negative multiple of scheduler_block_size="
            f"{given['scheduler_block_size']}, got {interval}"
        )


SPARSE_KINDS = {"SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec"}
MOST_ENCODER_TOKENS = 1 << 30  # vLLM's scheduler bounds them by a budget of its own

__all__ = ["check_retention", "translate_config", "translate_spec"]
