"""The arguments of a `KVCacheManager` beside its groups, checked, and what its parts are made with.

Flow:    KVCacheManager(...) -> [ManagerOptions] -> BlockPool, ManagerSettings, BlockHashing; save_state
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from kvjax.core.eviction import EvictionPolicyFactory
from kvjax.core.hashing.block_hashing import BlockHashing
from kvjax.core.kinds.manager_settings import ManagerSettings
from kvjax.core.kinds.retention import AUTO, ENDS
from kvjax.core.manager.release_rules import rules_of
from kvjax.core.manager.token_counts import as_count
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import CacheTier, TierLink
from kvjax.core.spec import KVCacheConfig
from kvjax.core.watch.kv_events import KVEventLog
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector

SIZES = ("max_model_len", "hash_block_size", "dcp_world_size", "pcp_world_size", "max_in_flight_tokens")


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Each option with its meaning; the defaults are those of `KVCacheManager`."""

    max_model_len: int  # most tokens of one request
    hash_block_size: int  # tokens of one `Request.block_hashes` entry; divides every group's block size
    # Whether full blocks become prefix hits.
    enable_caching: bool
    # Drop the last block of every hit (a drafting head needs its hidden states); where groups are marked
    # `is_eagle_group`, only theirs.
    use_eagle: bool
    # Whether `make_prefix_cache_stats` counts.
    log_stats: bool
    # Whether `take_events` tells what was stored and removed.
    enable_kv_cache_events: bool
    # Ranks of decode context parallelism; a block id stands for a block on each.
    dcp_world_size: int
    # Ranks of prefill context parallelism, likewise.
    pcp_world_size: int
    # Samples how long blocks stay.
    metrics_collector: KVCacheMetricsCollector | None
    # First size of the request table, a hint.
    max_num_reqs: int | None
    # Most tokens that steps in flight add to one request (the admission cap of windows); None: no better bound than
    # `max_model_len`.
    max_in_flight_tokens: int | None
    # "uncached_first" (blocks without a hash are reused first), or, with the policy "lru" alone, "append".
    free_order: str
    # Which free block to reuse next: a name of `EVICTION_POLICIES`, or a callable that makes a pool's `EvictionPolicy`
    # from its `HashedBlocks`.
    eviction_policy: str | EvictionPolicyFactory
    # Whether a block may be hit in the step that computes it; right only if a step writes all its KV before any
    # attention. False: not before `new_step_starts`.
    same_step_hits: bool
    # "concat" or "last": the hash of a block made of several hash blocks.
    coarse_hash_mode: str
    # Cache blocks of windows, chunks and recurrent states only where hits may end: where requests end, where they part,
    # and every so many tokens (0: nowhere else); hits of other lengths become shorter, and room is left for other
    # blocks. None: cache all of them. "auto": every 512 tokens, or the next multiple of all block sizes; None with
    # `sub_block_hits`. See kinds/retention.py.
    retention_interval: int | str | None
    # Which ends of a request are checkpoints then: "all" that another request could resume at, or those of a release of
    # vLLM, that of the same prompt: "vllm-0.32", "vllm-0.33".
    retention_ends: str
    # Whether `allocate_slots` answers None (wait for the next step) to a hit on a recurrent state that this step
    # computes. False: such a state is no hit before `new_step_starts`.
    defer_fresh_hits: bool
    # Admit a new request only if the worst cases of all that run and of it fit together (its final length is its prompt
    # and `max_tokens`); then no later call of a running request is refused.
    reserve: bool
    # Remember what each cached block was computed under, for `invalidate`: 4 bytes a block.
    track_origins: bool
    # Explains every lookup, see there.
    miss_reasons: MissReasons | None
    # Have the device zero every page before a request first uses it (`take_pages_to_zero`), so that nobody can ever
    # read what another request left there, nor a NaN. Pages into which external tokens are loaded are left alone: a
    # load may come before the zeros. Behind the last loaded token such a page holds what it held.
    zero_new_pages: bool
    # Let hits end inside a block, where a cached block begins with the same tokens: its page is copied. Not inside the
    # states of recurrent layers. Needs `same_step_hits=False`.
    sub_block_hits: bool
    # Keeps blocks beyond the pools: it sees cached ones before they are reused, and hits tell what it could load
    # (`KVCacheBlocks.elsewhere`).
    tier: CacheTier | None

    @staticmethod
    def vllm(release: str) -> dict[str, Any]:
        """Arguments of `KVCacheManager` that make it follow vLLM 0.16.0, 0.22.1, 0.32.0 or 0.33.0, by name.

        Raises:
            ValueError: another release.
        """
        return rules_of(release)

    def check(self) -> None:
        """Raises ValueError or NotImplementedError for options that can not be, or not together."""
        for name in SIZES:
            size = getattr(self, name)
            if size is not None:
                as_count(name, size, least=1)
        if isinstance(self.retention_interval, str) and self.retention_interval != AUTO:
            raise ValueError(
                f"expected retention_interval of tokens, {AUTO!r} or None, got {self.retention_interval!r}"
            )
        if self.retention_ends not in ENDS:
            raise ValueError(f"expected retention_ends of {', '.join(ENDS)}, got {self.retention_ends!r}")
        if not self.sub_block_hits:
            return
        if not self.enable_caching or self.same_step_hits:
            raise ValueError(
                f"expected enable_caching=True and same_step_hits=False with sub_block_hits=True, got "
                f"{self.enable_caching} and {self.same_step_hits}; a page is copied before the step writes"
            )
        if self.use_eagle:
            raise NotImplementedError("sub_block_hits does not work with use_eagle=True, which drops whole blocks")

    def check_kinds(self, kv_cache_config: KVCacheConfig) -> None:
        """Raises NotImplementedError where a group's kind does not work with an option."""
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            if group.kv_cache_spec.num_sink_tokens and (self.tier is not None or self.sub_block_hits):
                raise NotImplementedError(
                    f"group {group_id}: windows with num_sink_tokens > 0 work neither with a tier nor with "
                    f"sub_block_hits, got num_sink_tokens={group.kv_cache_spec.num_sink_tokens}"
                )

    def arguments(self, kv_cache_config: KVCacheConfig) -> Mapping[str, Any]:
        """What to make an equal manager with, by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return MappingProxyType({"kv_cache_config": kv_cache_config, **own})

    def settings(self) -> ManagerSettings:
        """What the managers of all groups have in common."""
        in_flight = self.max_in_flight_tokens
        return ManagerSettings(
            enable_caching=self.enable_caching,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_model_len if in_flight is None else in_flight,
            context_parallel_size=self.dcp_world_size * self.pcp_world_size,
            same_step_hits=self.same_step_hits,
            reserve=self.reserve,
            sub_block_hits=self.sub_block_hits,
            retention_interval=self.retention_interval,
            retention_ends=self.retention_ends,
            defer_fresh_hits=self.defer_fresh_hits,
        )

    def hashing(self) -> BlockHashing:
        """How the hash of a group's block is made of `Request.block_hashes`."""
        return BlockHashing(self.hash_block_size, self.coarse_hash_mode)

    def make_pools(self, kv_cache_config: KVCacheConfig, event_log: KVEventLog) -> tuple[BlockPool, ...]:
        """The pools of a config, all blocks free, with one log of events."""
        groups = kv_cache_config.kv_cache_groups
        return tuple(
            BlockPool(
                pool.num_blocks,
                self.enable_caching,
                self.hash_block_size,
                group_ids=[group_id for group_id, group in enumerate(groups) if group.pool_id == pool_id],
                enable_kv_cache_events=self.enable_kv_cache_events,
                metrics_collector=self.metrics_collector,
                free_order=self.free_order,
                eviction_policy=self.eviction_policy,
                event_log=event_log,
                track_origins=self.track_origins,
                zero_new_pages=self.zero_new_pages,
                tier_link=None if self.tier is None else TierLink(self.tier, pool_id, pool.num_blocks),
            )
            for pool_id, pool in enumerate(kv_cache_config.pools)
        )


__all__ = ["ManagerOptions"]
