"""sglang-jax's own prefix caches and allocators from a checkout, and kvjax's, for the same requests.

Flow:    path -> [make_pair] -> ServedRequests over RadixCache or SWARadixCache, and over kvjax's PrefixCache

kvjax's are made as the stack makes them after `install()`: by its names of allocators and by `create_tree_cache`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvjax.adapters.sglang_jax import install, uninstall
from scripts.stack_checks.checkouts import module_of
from scripts.stack_checks.served_requests import Rows, ServedRequests, StateRows

_CACHES = "sgl_jax.srt.mem_cache"
_STANDS_IN = (
    "sgl_jax.srt.utils",
    "sgl_jax.srt.utils.jax_utils",
    "sgl_jax.srt.utils.common_utils",
    "sgl_jax.srt.kernels.update_kv_cache.update_kv_cache",
    "sgl_jax.srt.kernels.ragged_paged_attention.util",
)
NUM_ROWS = 6


def make_pair(
    root: Path,
    *,
    pages: int,
    page_size: int,
    window_pages: int,
    window: int,
    ranks: int,
    policy: str = "stack",
) -> tuple[ServedRequests, ServedRequests]:
    """The stack's cache and kvjax's, each over pools of that many pages a rank; `window_pages` 0: no windows."""
    base = module_of(root, f"{_CACHES}.base_prefix_cache", _STANDS_IN)
    allocators = module_of(root, f"{_CACHES}.allocator", _STANDS_IN)
    trees = module_of(root, f"{_CACHES}.radix_cache", _STANDS_IN)
    swa_trees = module_of(root, f"{_CACHES}.swa_radix_cache", _STANDS_IN)
    classes = {**vars(base), "RadixKey": trees.RadixKey}
    size, size_swa = pages * page_size * ranks, window_pages * page_size * ranks
    seen = window if window_pages else None

    def allocator() -> Any:
        if window_pages:
            pool = _of_class(allocators.SWAKVPool, full_kv_pool=None, swa_kv_pool=None)
            return allocators.SWATokenToKVPoolAllocator(size, size_swa, pool, page_size, ranks)
        if page_size == 1:
            return allocators.TokenToKVPoolAllocator(size, None, ranks)
        return allocators.PagedTokenToKVPoolAllocator(size, page_size, None, dp_size=ranks)

    rows, theirs = Rows(NUM_ROWS), allocator()
    tree = (
        swa_trees.SWARadixCache(rows, theirs, window, page_size)
        if window_pages
        else trees.RadixCache(rows, theirs, page_size)
    )
    install(policy=policy)
    own_rows, ours = Rows(NUM_ROWS), allocator()
    cache = _tree_cache(root, own_rows, ours, page_size, seen)
    uninstall()
    return ServedRequests(tree, theirs, rows, classes, seen), ServedRequests(cache, ours, own_rows, classes, seen)


def make_state_pair(
    root: Path, *, pages: int, page_size: int, num_states: int, interval: int | None
) -> tuple[ServedRequests, ServedRequests]:
    """The stack's UnifiedRadixCache with recurrent states, and kvjax's cache, each with that many slots of states."""
    base = module_of(root, f"{_CACHES}.base_prefix_cache", _STANDS_IN)
    allocators = module_of(root, f"{_CACHES}.allocator", _STANDS_IN)
    trees = module_of(root, f"{_CACHES}.radix_cache", _STANDS_IN)
    unified = module_of(root, f"{_CACHES}.unified_radix_cache", _STANDS_IN)
    pools = module_of(root, f"{_CACHES}.memory_pool", _STANDS_IN)
    classes = {**vars(base), "RadixKey": trees.RadixKey}
    its_rows = type("HybridRows", (StateRows, pools.HybridReqToTokenPool), {"recurrent_state_pool": None})

    def allocator() -> Any:
        if page_size == 1:
            return allocators.TokenToKVPoolAllocator(pages, None, 1)
        return allocators.PagedTokenToKVPoolAllocator(pages * page_size, page_size, None)

    rows, theirs = its_rows(NUM_ROWS, num_states, interval), allocator()
    kinds = unified.ComponentType
    tree = unified.UnifiedRadixCache(
        rows,
        theirs,
        page_size=page_size,
        tree_components=(kinds.FULL, kinds.RECURRENT),
        enable_recurrent_extra_buffer=interval is not None,
        recurrent_track_interval=interval,
    )
    install()
    own_rows, ours = StateRows(NUM_ROWS, num_states, interval), allocator()
    cache = _tree_cache(root, own_rows, ours, page_size, None, is_recurrent=True, interval=interval)
    uninstall()
    return ServedRequests(tree, theirs, rows, classes, None), ServedRequests(cache, ours, own_rows, classes, None)


def _tree_cache(
    root: Path,
    rows: Rows,
    allocator: Any,
    page_size: int,
    window: int | None,
    *,
    is_recurrent: bool = False,
    interval: int | None = None,
) -> Any:
    """What the stack's registry makes."""
    registry = module_of(root, f"{_CACHES}.registry", _STANDS_IN)
    params = module_of(root, f"{_CACHES}.cache_init_params", _STANDS_IN).CacheInitParams(
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        sliding_window_size=window,
        enable_recurrent_extra_buffer=interval is not None,
        recurrent_track_interval=interval,
    )
    context = registry.TreeCacheBuildContext(
        server_args=SimpleNamespace(hicache_storage="disable", kv_events_config=None),
        params=params,
        is_hybrid_swa=window is not None,
        disable_radix_cache=False,
        effective_chunked_prefill_size=None,
        model_config=None,
        tp_size=1,
        is_hybrid_recurrent=is_recurrent,
    )
    return registry.create_tree_cache(context)


def _of_class(kind: type, **attributes: Any) -> Any:
    """An instance that was not initialised, with these attributes."""
    made = kind.__new__(kind)
    vars(made).update(vars(SimpleNamespace(**attributes)))
    return made
