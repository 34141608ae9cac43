"""One replica's cache as its events tell it: the hit that each request would get there.

Flow:    BlockStored, BlockRemoved, AllBlocksCleared -> [ToldCache] -> KVCacheManager.get_computed_blocks -> tokens

The rules of hits are the manager's own: a manager without blocks looks requests up in maps that events fill, in place
of its pools' own. Digests count as their last 8 bytes, as numbers on the wire do. Where a group's block is several hash
blocks, its last hash stands for all of them, since each covers those before it. A tier knows whole digests: with one,
so does this cache.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.options.release_rules import ReleaseRules
from kvjax.core.pool.block_hash_map import BlockHashToBlockMap
from kvjax.core.pool.cache_tier import CacheTier
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig
from kvjax.core.watch.kv_events import MEDIUM_DEVICE
from kvjax.core.watch.repeats import take_repeat
from kvjax.errors import NeverHitsWarning

KEY_BYTES = 8
KEY_MASK = (1 << 8 * KEY_BYTES) - 1
A_BLOCK = 1  # stands for every block: events do not tell ids

logger = logging.getLogger(__name__)


class ToldCache:
    """Used from one thread. An event costs about 1 us a block."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        tier: CacheTier | None = None,
        **options: Any,
    ) -> None:
        """A cache that has nothing, of a manager with these arguments; the same errors."""
        with warnings.catch_warnings():  # its own blocks never hit, and need not
            warnings.simplefilter("ignore", NeverHitsWarning)
            rules = ReleaseRules(coarse_hash_mode="last" if tier is None else "concat")
            self._manager = KVCacheManager(
                _without_blocks(kv_cache_config), max_model_len, hash_block_size, rules=rules, tier=tier, **options
            )
        self._key_of: Callable[[Any], BlockHash] = key_of if tier is None else _whole
        groups = range(len(kv_cache_config.kv_cache_groups))
        self._block_sizes = [self._manager.groups.place_of_group(group_id)[0].block_size for group_id in groups]
        self._maps = [BlockHashToBlockMap() for _ in groups]
        self._repeats: Counter[tuple[int, BlockHash]] = Counter()  # blocks of a hash beyond the first
        for pool in self._manager.block_pools:
            pool.hash_maps = {group_id: self._maps[group_id] for group_id in pool.hash_maps}
        self._has_warned = False
        self.knows_all = True  # whether all that the replica has was told

    def __len__(self) -> int:
        """Distinct hashes over all groups."""
        return sum(map(len, self._maps))

    def forget(self) -> None:
        """Drops everything: what is told from here on is not all that the replica has."""
        self._clear()
        self.knows_all = False

    def apply(self, events: Iterable[Any]) -> None:
        """Takes events, oldest first. Those of other memory than the device's are passed over."""
        for event in events:
            hashes = getattr(event, "block_hashes", None)
            if hashes is None:  # AllBlocksCleared
                self._clear()
                self.knows_all = True
            elif event.medium in (None, MEDIUM_DEVICE):
                group_id = self._group_of(event)
                if group_id is None:
                    self._refuse(event)
                elif hasattr(event, "token_ids"):
                    self._add(group_id, map(self._key_of, hashes))
                else:
                    self._remove(group_id, map(self._key_of, hashes))

    def num_hit_tokens(self, request: Request, keys: list[BlockHash]) -> int:
        """Tokens of the request that are a hit, and behind it those that the tier would bring.

        `keys` are those of its block hashes; with a tier these count themselves.
        """
        asked = copy.copy(request)
        if not self._manager.groups.has_tier:
            asked.block_hashes = keys
        blocks, num_tokens = self._manager.get_computed_blocks(asked)
        return num_tokens if blocks.elsewhere is None else num_tokens + blocks.elsewhere.num_tokens

    def _clear(self) -> None:
        for blocks in self._maps:
            blocks.clear()
        self._repeats.clear()

    def _add(self, group_id: int, keys: Iterable[BlockHash]) -> None:
        blocks = self._maps[group_id]
        for key in keys:
            if key in blocks:
                self._repeats[group_id, key] += 1
            else:
                blocks.insert(key, A_BLOCK)

    def _remove(self, group_id: int, keys: Iterable[BlockHash]) -> None:
        """Takes a block of each hash away. What was never told is passed over."""
        blocks, repeats = self._maps[group_id], self._repeats
        for key in keys:
            if not repeats or not take_repeat(repeats, (group_id, key)):
                blocks.pop(key, A_BLOCK)

    def _group_of(self, event: Any) -> int | None:
        """The group that an event is of; None: it is of none of these groups, or does not say of which."""
        num_groups, group_id = len(self._maps), event.group_idx
        if group_id is None and num_groups == 1:
            group_id = 0
        if group_id is None or not 0 <= group_id < num_groups:
            return None
        return group_id if getattr(event, "block_size", None) in (None, self._block_sizes[group_id]) else None

    def _refuse(self, event: Any) -> None:
        self.forget()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV events: expected groups with blocks of %s tokens, got an event of group %s with blocks of %s; the "
                "replica counts as unknown. Give the index the kv_cache_config of its replicas",
                self._block_sizes,
                event.group_idx,
                getattr(event, "block_size", "any"),
            )


def key_of(block_hash: bytes | int) -> BlockHash:
    """What stands for a block hash: its low 64 bits, big-endian."""
    if isinstance(block_hash, int):
        return BlockHash((block_hash & KEY_MASK).to_bytes(KEY_BYTES, "big"))
    return BlockHash(block_hash[-KEY_BYTES:])


def keys_of(block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
    """`key_of` of digests."""
    keys: list[Any] = [block_hash[-KEY_BYTES:] for block_hash in block_hashes]
    return keys


def _whole(block_hash: BlockHash) -> BlockHash:
    return block_hash


def _without_blocks(config: KVCacheConfig) -> KVCacheConfig:
    """The same groups in pools of a null block, one more and what sinks take for good."""
    sizes = [2] * len(config.pools)
    for group in config.kv_cache_groups:
        sizes[group.pool_id] += group.kv_cache_spec.num_reserved_blocks
    pools = tuple(replace(pool, num_blocks=size) for pool, size in zip(config.pools, sizes, strict=True))
    return replace(config, pools=pools, slabs=None)


__all__ = ["ToldCache", "key_of", "keys_of"]
