"""Drops cached blocks by what they were computed under, and keeps running requests from registering more such blocks.

Flow:    KVCacheManager.invalidate(cache_salt=, lora=, weight_version=, predicate=) -> [origin_filter, invalidate]
         -> BlockPool.evict_blocks, RequestTable.skip_registration

A request that runs on goes on with what it holds, but its later blocks continue invalidated ones, and another request
that computes the same prefix anew must not hit them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.hashing.extra_keys import LoRARequest
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.requests.request_table import RequestTable

OriginPredicate = Callable[[BlockOrigin], bool]


def origin_filter(
    cache_salt: str | None,
    lora: LoRARequest | str | None,  # an adapter, or the name of all adapters called so
    weight_version: int | str | None,
    predicate: OriginPredicate | None,
) -> OriginPredicate:
    """Holds for origins that meet every condition that is given.

    Raises:
        ValueError: none is given.
    """
    if cache_salt is None and lora is None and weight_version is None and predicate is None:
        raise ValueError(
            "expected a cache_salt, lora, weight_version or predicate to invalidate, got none; "
            "reset_prefix_cache forgets everything"
        )

    def matches(origin: BlockOrigin) -> bool:
        return (
            (cache_salt is None or origin.cache_salt == cache_salt)
            and (lora is None or lora in (origin.lora, origin.lora and origin.lora.name))
            and (weight_version is None or origin.weight_version == weight_version)
            and (predicate is None or predicate(origin))
        )

    return matches


def invalidate(pools: Sequence[BlockPool], request_table: RequestTable, matches: OriginPredicate) -> int:
    """Forgets the hashes of the blocks that match, and stops the requests that do; the number of those blocks.

    Raises:
        ValueError: a pool does not track origins. Nothing has changed.
    """
    found = []
    for pool in pools:
        if pool.origins is None:
            raise ValueError("expected a manager with track_origins=True to invalidate by origin, got one without")
        found.append(pool.origins.find(matches))
    stop_registering(request_table, matches)
    for pool, block_ids in zip(pools, found, strict=True):
        pool.evict_blocks(block_ids)
    return sum(block_ids.size for block_ids in found)


def stop_registering(request_table: RequestTable, predicate: OriginPredicate | None) -> int:
    """Keeps running requests that match (None: all) from registering blocks; their number."""
    rows = [r.row for r in request_table.requests if r is not None and (predicate is None or predicate(r.origin))]
    for row in rows:
        request_table.skip_registration(row)
    return len(rows)
