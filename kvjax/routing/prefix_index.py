"""What each replica has cached, made of its events, and the hit that each would give a request.

Flow:    BlockStored, BlockRemoved, AllBlocksCleared of a replica -> [PrefixIndex.match] -> hit tokens -> Router
Source:  the counts of llm-d's and Dynamo's indexers: a hash that several blocks hold is gone with the last of them

Events are those of `KVCacheManager.take_events`, or of the wire (`EventDecoder`). A replica's hit is what its
`get_computed_blocks` would return when all events are taken and its next step starts: every group counts, by the rules
of its kind. Hits inside blocks (`sub_block_hits`) are not counted. Events do not tell what tiers hold; those of
replicas in this process can be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.core.pool.cache_tier import CacheTier
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig
from kvjax.routing.told_cache import ToldCache, keys_of


class PrefixIndex:
    """Used from one thread. A lookup of 500 blocks costs 40 us, and 25 us for each replica that has all of them.

    Those 25 us are for one group, with six they are 65; a replica that has nothing costs 5 us.
    """

    def __init__(
        self,
        num_replicas: int,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        *,
        use_eagle: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        tiers: Sequence[CacheTier] = (),  # what each replica's tier holds
    ) -> None:
        """An index of replicas that have nothing.

        Args:
            num_replicas: numbered from 0.
            others: as of each replica's `KVCacheManager`. Of the config groups and their pools count, not how many
                blocks there are.

        Raises:
            ValueError: no replica, tiers of some of them only, or arguments that a manager refuses.
            NotImplementedError: likewise.
        """
        if num_replicas < 1:
            raise ValueError(f"expected num_replicas >= 1, got {num_replicas}")
        if tiers and len(tiers) != num_replicas:
            raise ValueError(f"expected a tier for each of {num_replicas} replicas or none, got {len(tiers)}")
        options = {"use_eagle": use_eagle, "dcp_world_size": dcp_world_size, "pcp_world_size": pcp_world_size}
        self._caches = [
            ToldCache(kv_cache_config, max_model_len, hash_block_size, tier, **options)
            for tier in tiers or (None,) * num_replicas
        ]

    def apply(self, replica: int, events: Iterable[Any]) -> None:
        """Takes a replica's events, oldest first; none raises.

        A removal of what was never told is passed over. An event that does not fit the groups makes the replica
        unknown, as `forget` does, with a warning.
        """
        self._caches[replica].apply(events)

    def forget(self, replica: int) -> None:
        """Drops what is known of a replica: events were lost. Until all is told again, its hits are lower bounds."""
        self._caches[replica].forget()

    def knows_all(self, replica: int) -> bool:
        """Whether hits are exact: all events since the replica had nothing were taken, or a snapshot of it."""
        return self._caches[replica].knows_all

    def match(self, request: Request) -> list[int]:
        """Tokens of the request that each replica would find cached.

        Raises:
            ValueError: the request was hashed with another block size.
        """
        keys = keys_of(request.block_hashes)
        return [cache.num_hit_tokens(request, keys) for cache in self._caches]

    def num_blocks(self, replica: int) -> int:
        """Blocks of distinct contents that a replica has, over all groups."""
        return len(self._caches[replica])


__all__ = ["PrefixIndex"]
