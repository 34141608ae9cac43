"""Equal replicas behind one router, which knows their caches by KV events.

Flow:    Job, when it arrives -> [RoutedReplicas.submit]: PrefixIndex.match -> Router.pick -> Replica.submit

By the time a request is routed the index knows the events of all steps that have ended, and no others: a step that is
under way has told nothing. Of what tiers hold there are no events: the router asks them for the blocks behind a hit, of
the group that lasts longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.core.hashing.block_hash import BlockHash, BlockHashListWithBlockSize
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig
from kvjax.replay.recorder import Recorder
from kvjax.replay.replica import Deployment, Replica
from kvjax.replay.running_batch import Job
from kvjax.routing import PrefixIndex, make_router
from kvjax.tiers.stats import TierStats


class RoutedReplicas:
    """One side of a deployment: all of it, or those that prefill, or those that decode."""

    def __init__(self, of: Deployment, replicas: Sequence[Replica], router: str) -> None:
        """Empty replicas of `of`.

        Raises:
            ValueError: no replica, or an unknown router.
        """
        kv_cache_config = of.plan.config
        self.replicas = tuple(replicas)
        self._router = make_router(router)
        self._group_id = _longest_lasting_group(kv_cache_config)
        self._hash_block_size = of.config.hash_block_size
        self._index = PrefixIndex(len(replicas), kv_cache_config, of.longest, self._hash_block_size)
        self._block_size = kv_cache_config.kv_cache_groups[self._group_id].kv_cache_spec.block_size

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """What each replica measured."""
        return tuple(replica.recorder for replica in self.replicas)

    @property
    def tier_stats(self) -> tuple[TierStats, ...]:
        """What each replica's tiers have done; none without tiers."""
        return tuple(replica.tiers.stats for replica in self.replicas if replica.tiers is not None)

    @property
    def ended_s(self) -> float:
        """When the last step ended."""
        return max(replica.simulation.clock.now_s for replica in self.replicas)

    def submit(self, job: Job, request: Request) -> int:
        """Gives a job that arrives at `job.arrives_s` to the replica that the router picks; its number."""
        for number, replica in enumerate(self.replicas):
            self._index.apply(number, replica.take_events(job.arrives_s))
        hits = self._hits(request)
        states = [replica.state(hit) for replica, hit in zip(self.replicas, hits, strict=True)]
        chosen = self._router.pick(job.source.input_length, states)
        job.request, job.expected_tokens = request, job.source.input_length - hits[chosen]
        self.replicas[chosen].submit(job)
        return chosen

    def _hits(self, request: Request) -> list[int]:
        """Tokens of the prompt that each replica has, in its pool or its tiers."""
        in_pool, size = self._index.match(request), self._block_size
        usable = self._hashes_of_blocks(request)[: (request.num_tokens - 1) // size]
        return [
            found + replica.num_in_tiers(usable[found // size :], self._group_id) * size
            for found, replica in zip(in_pool, self.replicas, strict=True)
        ]

    def _hashes_of_blocks(self, request: Request) -> Sequence[BlockHash]:
        """Hashes of a request's blocks as its group has them."""
        if self._block_size == self._hash_block_size:
            return request.block_hashes
        return list(BlockHashListWithBlockSize(request.block_hashes, self._hash_block_size, self._block_size))


def _longest_lasting_group(config: KVCacheConfig) -> int:
    """The group whose blocks stand for whole prefixes: the first that keeps all tokens, else the first."""
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    whole = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
    return next((i for i, kind in enumerate(kinds) if kind in whole), 0)


__all__ = ["RoutedReplicas"]
