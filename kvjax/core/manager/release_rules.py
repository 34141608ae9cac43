"""The rules of a release of vLLM, as options of a manager: what it caches, and what it evicts first.

Flow:    "0.33.0" -> [rules_of] -> ManagerOptions.vllm -> KVCacheManager(..., **rules), adapters, conformance
Source:  vllm/v1/core of each release: block_pool.py, kv_cache_utils.py, single_type_kv_cache_manager.py

    rule                0.16.0, 0.22.1     0.32.0, 0.33.0
    free blocks         LRU                LRU, unhashed ones first
    windows and states  all are cached     at checkpoints
    chunks              all are cached     all are cached
    hash of a block of  hashes joined      the last hash
      several hashes
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

OLD: Mapping[str, Any] = MappingProxyType(
    {
        "eviction_policy": "lru",
        "free_order": "append",
        "coarse_hash_mode": "concat",
        "retention_interval": None,
        "retention_ends": "all",
        "defer_fresh_hits": True,
    }
)
NEW: Mapping[str, Any] = MappingProxyType(
    {
        **OLD,
        "free_order": "uncached_first",
        "coarse_hash_mode": "last",
        "retention_interval": 0,
    }
)
RELEASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "0.16.0": OLD,
        "0.22.1": OLD,
        "0.32.0": MappingProxyType({**NEW, "retention_ends": "vllm-0.32"}),
        "0.33.0": MappingProxyType({**NEW, "retention_ends": "vllm-0.33"}),
    }
)


def rules_of(release: str) -> dict[str, Any]:
    """Arguments of `KVCacheManager` that make it follow a release of vLLM, one of `RELEASES`.

    Raises:
        ValueError: no such release.
    """
    if release not in RELEASES:
        raise ValueError(f"expected a release of vLLM of {', '.join(RELEASES)}, got {release!r}")
    return dict(RELEASES[release])


__all__ = ["RELEASES", "rules_of"]
