"""What a `KVCacheManager` may decide one way or another, as one value.

Flow:    keywords of KVCacheManager, a preset -> [ManagerOptions] -> pools, groups, parts of the manager; save_state
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from kvjax.core.eviction import DEFAULT_POLICY, RANKED_POLICIES, EvictionPolicyFactory
from kvjax.core.options.release_rules import RELEASES, ReleaseRules
from kvjax.core.tables.token_counts import as_count

AUTO = "auto"  # as `retention_interval`
OLD_RELEASES = ("0.16.0", "0.22.1")  # of vLLM, which cache every block of windows and states
SIZES = ("dcp_world_size", "pcp_world_size", "max_in_flight_tokens")


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Options of a `KVCacheManager`; each default is the best that was measured for who sets nothing.

    Args:
        enable_caching: whether full blocks become prefix hits.
        use_eagle: whether the last block of every hit is dropped, since a drafting head needs its hidden states. Where
            groups are marked `is_eagle_group`, only theirs.
        log_stats: whether `make_prefix_cache_stats` counts.
        enable_kv_cache_events: whether `take_events` tells what was stored and removed.
        dcp_world_size: ranks of decode context parallelism; a block id stands for a block on each.
        pcp_world_size: ranks of prefill context parallelism, likewise.
        max_num_reqs: first size of the request table, a hint.
        max_in_flight_tokens: most tokens that steps in flight add to one request, which bounds the blocks of windows;
            None: no better bound than `max_model_len`.
        eviction_policy: which free block is reused next: a name of `EVICTION_POLICIES`, or a callable that makes a
            pool's `EvictionPolicy` from its `HashedBlocks`.
        same_step_hits: whether a block may be hit in the step that computes it; right only if a step writes all its KV
            before any attention. False: not before `new_step_starts`.
        retention_interval: caches blocks of windows, chunks and recurrent states only where hits may end: where
            requests end, where they part, and every so many tokens (0: nowhere else). Hits of other lengths become
            shorter, and room is left for other blocks. None: all are cached. "auto": every 512 tokens, or the next
            multiple of all block sizes; None with `sub_block_hits`. See kinds/retention.py.
        checkpoints_in_step: most recurrent states that a step leaves of one request on its way, at checkpoints: so many
            fewer steps end there. For devices whose ops take `GroupPlan.checkpoint_ends`. A state for which there is no
            block is left out.
        num_hash_lookahead_tokens: tokens behind a block that its hash covers too, as those of requests are made.
        reserve: whether a new request is admitted only if the worst cases of all that run and of it fit together (its
            final length is its prompt and `max_tokens`); then no later call of a running request is refused.
        track_origins: whether to remember what each cached block was computed under, for `invalidate`: 4 bytes a block.
        zero_new_pages: whether the device zeroes every page before a request first uses it (`take_pages_to_zero`), so
            that nobody can ever read what another request left there, nor a NaN. Pages into which external tokens are
            loaded are left alone: a load may come before the zeros. Behind the last loaded token such a page holds
            what it held.
        sub_block_hits: whether hits end inside a block, where a cached block begins with the same tokens: its page is
            copied. Not inside the states of recurrent layers. Needs `same_step_hits=False`.
        rules: what releases of vLLM decide in different ways; `ManagerOptions.vllm` sets them.

    Raises:
        ValueError: a value is outside its range, or two do not go together.
        NotImplementedError: `sub_block_hits` with `use_eagle`.
    """

    enable_caching: bool = True
    use_eagle: bool = False
    log_stats: bool = False
    enable_kv_cache_events: bool = False
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    max_num_reqs: int | None = None
    max_in_flight_tokens: int | None = None
    eviction_policy: str | EvictionPolicyFactory = DEFAULT_POLICY
    same_step_hits: bool = True
    retention_interval: int | str | None = AUTO
    checkpoints_in_step: int = 0
    num_hash_lookahead_tokens: int = 0
    reserve: bool = False
    track_origins: bool = False
    zero_new_pages: bool = False
    sub_block_hits: bool = False
    rules: ReleaseRules = field(default_factory=ReleaseRules)

    @classmethod
    def vllm(cls, release: str) -> Self:
        """What makes a manager follow vLLM 0.16.0, 0.22.1, 0.32.0 or 0.33.0: what it caches, and what it evicts first.

            rule                0.16.0, 0.22.1     0.32.0, 0.33.0
            free blocks         LRU                LRU, unhashed ones first
            windows and states  all are cached     at checkpoints
            chunks              all are cached     all are cached
            hash of a block of  hashes joined      the last hash
              several hashes

        Raises:
            ValueError: another release.
        """
        if release not in RELEASES:
            raise ValueError(f"expected a release of vLLM of {', '.join(RELEASES)}, got {release!r}")
        interval = None if release in OLD_RELEASES else 0
        return cls(eviction_policy="lru", retention_interval=interval, rules=RELEASES[release])

    @property
    def may_share_slabs(self) -> bool:
        """Whether pools under these options can share slabs: their policies rank blocks of several pools."""
        return self.eviction_policy in RANKED_POLICIES and not self.reserve

    def replaced(self, named: dict[str, Any]) -> Self:
        """These options with others by name.

        Raises:
            TypeError: a name is none of an option.
            ValueError, NotImplementedError: as when one is made.
        """
        names = [one.name for one in fields(self)]
        for name in named:
            if name not in names:
                raise TypeError(f"expected an option of {', '.join(names)}, got {name!r}")
        return replace(self, **named)

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if size is not None:
                as_count(name, size, least=1)
        as_count("checkpoints_in_step", self.checkpoints_in_step)
        as_count("num_hash_lookahead_tokens", self.num_hash_lookahead_tokens)
        interval = self.retention_interval
        if isinstance(interval, str) and interval != AUTO:
            raise ValueError(f"expected retention_interval of tokens, {AUTO!r} or None, got {interval!r}")
        if not self.sub_block_hits:
            return
        if not self.enable_caching or self.same_step_hits:
            raise ValueError(
                f"expected enable_caching=True and same_step_hits=False with sub_block_hits=True, got "
                f"{self.enable_caching} and {self.same_step_hits}; a page is copied before the step writes"
            )
        if self.use_eagle:
            raise NotImplementedError("sub_block_hits does not work with use_eagle=True, which drops whole blocks")


__all__ = ["AUTO", "ManagerOptions"]
