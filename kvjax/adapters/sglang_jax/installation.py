"""kvjax's prefix cache and slot allocators under sglang-jax's scheduler and model runner, in place of its own.

    from kvjax.adapters import sglang_jax
    sglang_jax.install()         # before the engine is made
    sglang_jax.uninstall()

Flow:    ModelRunner -> [slot_allocator_of] -> SlotAllocator; build_kv_cache -> [prefix_cache_of] -> PrefixCache

The stack asks with isinstance what it got, so what it gets is kvjax's class with the stack's as its last base: nothing
of that base is initialised, and only its walks of the tree are left.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvjax.adapters.policy import KVJAX, chosen_policy
from kvjax.adapters.sglang_jax.metadata import SGLANG_JAX
from kvjax.adapters.sglang_jax.prefix_cache import PrefixCache
from kvjax.adapters.sglang_jax.slot_allocator import SlotAllocator
from kvjax.adapters.sglang_jax.window_allocator import WindowSlotAllocator
from kvjax.adapters.stack import require_stack

_ALLOCATORS = "sgl_jax.srt.mem_cache.allocator"
_REGISTRY = "sgl_jax.srt.mem_cache.registry"
_replaced: list[tuple[Any, str, Any]] = []


def as_stack_class(ours: type, name: str, **attributes: str) -> Any:
    """kvjax's class, with those of its attributes changed, that is the stack's called `name` too; as `Stack.load`."""
    return type(f"Kvjax{name}", (ours, SGLANG_JAX.load(name)), attributes)


def prefix_cache_of(context: Any, **attributes: str) -> Any:
    """The cache for a `TreeCacheBuildContext` whose allocator is kvjax's; its class with those attributes.

    Raises:
        NotImplementedError: EAGLE or a host tier are asked for, or the radix cache is disabled.
        MissingStackError, UnknownStackError: as `PrefixCache`.
    """
    SGLANG_JAX.load("TreeCacheBuildContext")
    SGLANG_JAX.load("CacheInitParams")
    params = context.params
    for name, asked in (
        ("disable_radix_cache", context.disable_radix_cache),
        (f"hicache_storage {context.server_args.hicache_storage}", context.server_args.hicache_storage != "disable"),
    ):
        if asked:
            raise NotImplementedError(
                f"expected a model and settings that kvjax's cache serves, got {name}; uninstall()"
            )
    base = "SWARadixCache" if context.is_hybrid_swa else "BasePrefixCache"
    return as_stack_class(PrefixCache, base, **attributes)(
        params.req_to_token_pool,
        params.token_to_kv_pool_allocator,
        params.page_size,
        sliding_window_size=params.sliding_window_size if context.is_hybrid_swa else None,
        enable_kv_cache_events=context.server_args.kv_events_config is not None,
        is_eagle=params.is_eagle,
        is_hybrid_recurrent=bool(context.is_hybrid_recurrent),
        enable_recurrent_extra_buffer=bool(params.enable_recurrent_extra_buffer),
        recurrent_track_interval=params.recurrent_track_interval,
    )


def install(*, policy: str | None = None) -> None:
    """Puts kvjax's classes where the stack makes its own. Again: with another policy.

    Args:
        policy: "stack" evicts what was used longest ago, "kvjax" first the window pages and recurrent states at which
            no prompt and no answer ended; None: as the environment variable KVJAX_POLICY says, or else "stack".

    Raises:
        MissingStackError: sglang-jax cannot be imported.
        UnknownStackError: its classes are none of the recorded versions'.
        ValueError: the policy is another one. Nothing is changed.
    """
    # "learned" counts by admissions, which the stack's allocators are not told of.
    attributes = {"eviction_policy": "probation"} if chosen_policy(policy) == KVJAX else {}
    uninstall()
    paged = as_stack_class(SlotAllocator, "BaseTokenToKVPoolAllocator")
    for name in (
        "TokenToKVPoolAllocator",
        "PagedTokenToKVPoolAllocator",
        "SWARadixCache",
        "default_radix_cache_factory",
    ):
        SGLANG_JAX.load(name)
    windows = as_stack_class(WindowSlotAllocator, "SWATokenToKVPoolAllocator", **attributes)
    allocators = require_stack(_ALLOCATORS, SGLANG_JAX.package, SGLANG_JAX.versions)
    registry = require_stack(_REGISTRY, SGLANG_JAX.package, SGLANG_JAX.versions)

    def of_single_tokens(size: int, kvcache: Any, dp_size: int = 1) -> Any:
        return paged(size, 1, kvcache, dp_size=dp_size)

    for module, name, ours in (
        (allocators, "TokenToKVPoolAllocator", of_single_tokens),
        (allocators, "PagedTokenToKVPoolAllocator", paged),
        (allocators, "SWATokenToKVPoolAllocator", windows),
        (registry, "default_radix_cache_factory", partial(prefix_cache_of, **attributes)),
    ):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, ours)


def uninstall() -> None:
    """Puts the stack's own classes back."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)
