"""The KV cache of a deployment for its scheduler: prefix hits, slots for new tokens, and blocks given back.

Flow:    Request -> [KVCacheManager] -> block ids, block tables -> StepPlan; sampled tokens come back to the Request
Source:  names and semantics of vLLM v1/core/kv_cache_manager.py

A request's life, each arrow one call:

    unknown --allocate_slots--> running --allocate_slots | plan_step--> running --free--> unknown

`get_computed_blocks` asks for a hit before the first `allocate_slots`; preemption is `free` and
`num_computed_tokens = 0`. The caller advances `num_computed_tokens` after each step.

Invariants (`check_invariants`):

    M1  a block's references are its entries in all block tables, and those that copies and pins hold outside them
    M2  every row with blocks is owned by a request of the table
    M3  a row that sleeps (`quiet_until`) has nothing to allocate, register or give back
    and those of the pools, the groups and the request table
"""

from __future__ import annotations

from types import MappingProxyType

import numpy.typing as npt

from kvjax.core.eviction import EvictionPolicyFactory
from kvjax.core.hashing.block_hashing import BlockHashing
from kvjax.core.kinds.single_type_manager import ManagerSettings
from kvjax.core.manager.block_sharing import BlockSharing
from kvjax.core.manager.coordinator import get_kv_cache_coordinator
from kvjax.core.manager.manager_reader import ManagerReader
from kvjax.core.manager.prefix_cache_control import PrefixCacheControl
from kvjax.core.manager.shared_prefix import find_shared_prefix
from kvjax.core.manager.slot_allocator import SlotAllocator, SlotCounts
from kvjax.core.manager.step_planner import StepPlanner
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.kv_cache_blocks import NO_BLOCK_IDS, KVCacheBlocks
from kvjax.core.requests.hasher_check import HasherCheck
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.save.manager_state import SavableManager
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepResult
from kvjax.core.watch.kv_events import KVEventLog
from kvjax.core.watch.prefix_cache_stats import PrefixCacheStats
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector


class KVCacheManager(ManagerReader, PrefixCacheControl, BlockSharing, SavableManager):
    """Block tables and prefix cache of all groups. Used from one thread; a call that raises has changed nothing."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        *,
        max_num_reqs: int | None = None,
        max_in_flight_tokens: int | None = None,
        free_order: str = "append",
        eviction_policy: str | EvictionPolicyFactory = "lru",
        same_step_hits: bool = True,
        coarse_hash_mode: str = "concat",
        retention_interval: int | None = None,
        reserve: bool = False,
        track_origins: bool = False,
        miss_reasons: MissReasons | None = None,
        zero_new_pages: bool = False,
        sub_block_hits: bool = False,
    ) -> None:
        """An empty cache.

        Args:
            kv_cache_config: pools and groups.
            max_model_len: most tokens of one request.
            hash_block_size: tokens of one `Request.block_hashes` entry; divides every group's block size.
            enable_caching: whether full blocks become prefix hits.
            use_eagle: drop the last block of every hit (a drafting head needs its hidden states); where groups are
                marked `is_eagle_group`, only theirs.
            log_stats: whether `make_prefix_cache_stats` counts.
            enable_kv_cache_events: whether `take_events` tells what was stored and removed.
            dcp_world_size: ranks of decode context parallelism; a block id stands for a block on each.
            pcp_world_size: ranks of prefill context parallelism, likewise.
            metrics_collector: samples how long blocks stay.
            max_num_reqs: first size of the request table, a hint.
            max_in_flight_tokens: most tokens that steps in flight add to one request (the admission cap of windows);
                None: no better bound than `max_model_len`.
            free_order: "append" or "uncached_first" (blocks without a hash are reused first), of the policy "lru".
            eviction_policy: which free block to reuse next: "lru", "slru", "cost", or a callable that makes the
                `EvictionPolicy` of a pool from its `HashedBlocks`.
            same_step_hits: whether a block may be hit in the step that computes it; right only if a step writes all
                its KV before any attention. False: not before `new_step_starts`.
            coarse_hash_mode: "concat" or "last": the hash of a block made of several hash blocks.
            retention_interval: cache blocks of sliding windows and recurrent states only where hits may end: where
                requests end, where they part, and every so many tokens (0: nowhere else); hits of other lengths become
                shorter, and room is left for other blocks. None: cache all of them. See retention.py.
            reserve: admit a new request only if the worst cases of all that run and of it fit together (its final
                length is its prompt and `max_tokens`); then no later call of a running request is refused.
            track_origins: remember what each cached block was computed under, for `invalidate`: 4 bytes a block.
            miss_reasons: explains every lookup, see there.
            zero_new_pages: have the device zero every page before a request first uses it (`take_pages_to_zero`), so
                that nobody can ever read what another request left there, nor a NaN.
            sub_block_hits: let hits end inside a block, where a cached block begins with the same tokens: its page is
                copied. Not inside the states of recurrent layers. Needs `same_step_hits=False`.

        Raises:
            ValueError: a size is below 1, `hash_block_size` does not divide a block size, a spec has no manager, or
                `retention_interval` is no multiple of every block size.
            NotImplementedError: a kind does not work with EAGLE or context parallelism, or `sub_block_hits` with EAGLE
                or `retention_interval`.
        """
        self.arguments = MappingProxyType({name: value for name, value in locals().items() if name != "self"})
        if max_in_flight_tokens is None:
            max_in_flight_tokens = max_model_len
        _check_sizes(
            max_model_len=max_model_len,
            hash_block_size=hash_block_size,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            max_in_flight_tokens=max_in_flight_tokens,
        )
        if sub_block_hits:
            _check_sub_block_hits(enable_caching, same_step_hits, use_eagle)
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self._event_log = KVEventLog()
        self.block_pools = self._make_pools(
            metrics_collector, free_order, eviction_policy, track_origins, zero_new_pages
        )
        settings = ManagerSettings(
            enable_caching=enable_caching,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            context_parallel_size=dcp_world_size * pcp_world_size,
            same_step_hits=same_step_hits,
            reserve=reserve,
            sub_block_hits=sub_block_hits,
            retention_interval=retention_interval,
        )
        hashing = BlockHashing(hash_block_size, coarse_hash_mode)
        self.coordinator = get_kv_cache_coordinator(kv_cache_config, self.block_pools, settings, hashing, use_eagle)
        self.request_table = RequestTable(max_num_reqs, max_model_len)
        self.coordinator.reserve_rows(self.request_table.capacity)
        self._planner = StepPlanner(self.coordinator, self.request_table)
        self._pool_of_group = tuple(self.block_pools[group.pool_id] for group in kv_cache_config.kv_cache_groups)
        self.empty_kv_cache_blocks = KVCacheBlocks((NO_BLOCK_IDS,) * self.num_kv_cache_groups, self._pool_of_group)
        self._slots = SlotAllocator(self.coordinator, self.request_table, self.empty_kv_cache_blocks)
        self._stats = PrefixCacheStats() if log_stats else None
        self.miss_reasons = miss_reasons
        if miss_reasons is not None:
            miss_reasons.attach(self.coordinator)
        self._hasher_check = HasherCheck(hash_block_size, publishes_hashes=enable_kv_cache_events)

    def _make_pools(
        self,
        metrics_collector: KVCacheMetricsCollector | None,
        free_order: str,
        eviction_policy: str | EvictionPolicyFactory,
        track_origins: bool,
        zero_new_pages: bool,
    ) -> tuple[BlockPool, ...]:
        groups = self.kv_cache_config.kv_cache_groups
        return tuple(
            BlockPool(
                pool.num_blocks,
                self.enable_caching,
                self.hash_block_size,
                group_ids=[group_id for group_id, group in enumerate(groups) if group.pool_id == pool_id],
                enable_kv_cache_events=self.enable_kv_cache_events,
                metrics_collector=metrics_collector,
                free_order=free_order,
                eviction_policy=eviction_policy,
                event_log=self._event_log,
                track_origins=track_origins,
                zero_new_pages=zero_new_pages,
            )
            for pool_id, pool in enumerate(self.kv_cache_config.pools)
        )

    # -- hits -------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest prefix of the request that is cached, at most all tokens but the last.

        Nothing is held yet: pass the result to `allocate_slots` before any other call that allocates.

        Returns:
            Its blocks per group, and its tokens; with `sub_block_hits` the last blocks may be used in part.

        Raises:
            ValueError: the request was hashed with another block size.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._not_looked_up(request)
        self._hasher_check.check(request)
        if self.coordinator.reads_encoder and not request.names_input(self.hash_block_size):
            return self._not_looked_up(request)
        if self.coordinator.sub_block_hits is not None:
            hits, num_tokens = self.coordinator.sub_block_hits.find(request, request.num_tokens - 1)
        else:
            hits, num_tokens = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        if self._stats is not None:
            self._stats.record(request.num_tokens, num_tokens, preempted=request.num_preemptions > 0)
        if self.miss_reasons is not None:
            self.miss_reasons.explain(request, num_tokens)
        if self.coordinator.retention is not None:
            shared = find_shared_prefix(self.coordinator, request.block_hashes, request.num_tokens - 1)
            if shared > num_tokens:
                return KVCacheBlocks(hits, self._pool_of_group, shared), num_tokens
        return self._blocks(hits), num_tokens

    def _not_looked_up(self, request: Request) -> tuple[KVCacheBlocks, int]:
        if self.miss_reasons is not None:
            self.miss_reasons.explain_off(request)
        return self.empty_kv_cache_blocks, 0

    def new_step_starts(self) -> None:
        """Lets lookups hit what earlier steps computed; call it once before each step with `same_step_hits=False`."""
        self.coordinator.new_step_starts()

    # -- slots ------------------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        num_in_flight_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Slots for the tokens of a request's next step.

            | computed | new_computed | external |  new  | lookahead |
            |          |    a hit     |  loaded  | to be computed    |
                                      |   slots are taken from here  |

        First what left the windows is given back; if the rest then does not fit, nothing else has happened. Blocks
        that the tokens up to `new` fill become prefix hits, those of tokens that the request does not have yet
        (drafts, tokens in flight) excepted.

        Args:
            request: running here, or new: then it gets a row.
            num_new_tokens: to be computed in this step; 0 only while external tokens are loaded.
            num_new_computed_tokens: of a new request, tokens of the hit.
            new_computed_blocks: of a new request, blocks of the hit.
            num_lookahead_tokens: drafted tokens that need slots too, as far as `max_model_len` allows.
            num_external_computed_tokens: of a new request, tokens after the hit that come from outside; where the hit
                ends inside a block, they are to be written there after the step's page copies.
            delay_cache_blocks: register no block (its KV arrives later; then call `cache_blocks`).
            num_encoder_tokens: of a new request, tokens of the encoder, for kinds that attend to them.
            num_in_flight_tokens: computed tokens of steps not read yet: they may be taken back, so windows keep what
                they see.
            full_sequence_must_fit: refuse unless the blocks of all tokens of the request, as far as the admission cap
                of each kind counts them, are free.

        Returns:
            Per group the new blocks (those of external tokens not among them), or None: they do not fit.

        Raises:
            ValueError: counts that are negative or do not fit together, more tokens than `max_model_len`, a hit for a
                running request, another request of the same id, a step that recurrent groups can not take
                (`limit_step`).
            BlockStateError: a block of the hit is no longer cached.
        """
        row = request.row
        coordinator = self.coordinator
        if (
            0 <= row < coordinator.quiet_until.size
            and self.request_table.requests[row] is request
            and new_computed_blocks is None
            and num_new_tokens > 0
            and num_lookahead_tokens >= 0
            and num_in_flight_tokens >= 0
            and not (num_new_computed_tokens or num_external_computed_tokens or num_encoder_tokens)
            and not full_sequence_must_fit
        ):
            slots = self.request_table.num_computed_tokens.item(row) + num_new_tokens + num_lookahead_tokens
            if slots <= coordinator.quiet_until.item(row):
                return self.empty_kv_cache_blocks
            ids = self._slots.extend(
                request, row, num_new_tokens, num_lookahead_tokens, num_in_flight_tokens, delay_cache_blocks
            )
            return None if ids is None else self._blocks(ids)
        counts = SlotCounts(
            new=num_new_tokens,
            new_computed=num_new_computed_tokens,
            lookahead=num_lookahead_tokens,
            external=num_external_computed_tokens,
            encoder=num_encoder_tokens,
            in_flight=num_in_flight_tokens,
        )
        self._hasher_check.check(request)
        ids = self._slots.allocate(request, counts, new_computed_blocks, delay_cache_blocks, full_sequence_must_fit)
        return None if ids is None else self._blocks(ids)

    def plan_step(
        self,
        rows: npt.ArrayLike,  # integer[n] distinct rows of running requests, in scheduling order
        num_new_tokens: npt.ArrayLike,  # integer[n] or one integer, >= 1
        *,
        num_lookahead_tokens: npt.ArrayLike = 0,  # likewise, >= 0
        num_in_flight_tokens: npt.ArrayLike = 0,  # likewise, >= 0
        delay_cache_blocks: bool = False,
    ) -> StepResult:
        """Slots for one step of many running requests: what `allocate_slots` row by row would do, in bulk.

        Stops at the first row that does not fit (of which only the blocks outside its windows were given back):
        preempt a request, and call again with the rows from `num_planned` on.

        Raises:
            ValueError: a row that no request owns or that comes twice, counts out of range, more tokens than
                `max_model_len`, or a step that recurrent groups can not take (`limit_step`).
        """
        return self._planner.plan(rows, num_new_tokens, num_lookahead_tokens, num_in_flight_tokens, delay_cache_blocks)

    def limit_step(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
    ) -> int:
        """Of that many new tokens, those that one step should take so that recurrent states are cached right.

        All of them where no group is recurrent. Steps of a prompt end where blocks end, and at the checkpoints of
        `retention_interval` (for a new request the hit's blocks tell of one); 0 if the tokens do not reach the end of
        a block: wait for a larger budget.
        """
        computed = request.num_computed_tokens + num_new_computed_tokens
        state_steps, retention = self.coordinator.state_steps, self.coordinator.retention
        num_new = state_steps.limit(computed, num_new_tokens, request.num_tokens)
        if retention is None or not state_steps or computed >= request.num_tokens - 1:
            return num_new
        if request.row >= 0:
            lengths = retention.lengths_of(request.row)
        else:
            shared = 0 if new_computed_blocks is None else new_computed_blocks.num_shared_tokens
            lengths = retention.lengths_for(request.num_tokens, shared)
        return retention.step_end(computed, computed + num_new, lengths) - computed

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Registers the full blocks of the first `num_computed_tokens` tokens, after `delay_cache_blocks`.

        Raises:
            UnknownRequestError: the manager does not hold the request.
            ValueError: more tokens than the request's blocks hold.
        """
        row = self._row(request)
        if not self.enable_caching or self.request_table.skips_registration[row]:
            return
        for manager in self.coordinator.managers:
            if not manager.is_prefix_cacheable:
                continue
            slots = manager.held_slots(row)
            if not 0 <= num_computed_tokens <= slots:
                raise ValueError(f"expected num_computed_tokens in [0, {slots}], got {num_computed_tokens}")
        num_hashed = self.request_table.num_hashed_blocks.item(row) * self.hash_block_size
        self.coordinator.cache_blocks(request, row, min(num_computed_tokens, num_hashed))
        self.coordinator.note_quiet(row)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token after the first `num_computed_tokens` attends to.

        Raises:
            UnknownRequestError: the manager holds no such request.
            ValueError: a negative number of tokens.
        """
        row = self.request_table.row_of(request_id)
        if num_computed_tokens < 0:
            raise ValueError(f"expected num_computed_tokens >= 0, got {num_computed_tokens}")
        self.coordinator.remove_skipped_blocks(row, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Gives all blocks of a request back, its last block first, and its row. What is cached stays a hit.

        Raises:
            UnknownRequestError: the manager does not hold the request (it was freed before, for example).
        """
        row = self._row(request)
        self.coordinator.free(row)
        self.request_table.release(request)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"expected {name} >= 1, got {size}")


def _check_sub_block_hits(enable_caching: bool, same_step_hits: bool, use_eagle: bool) -> None:
    if not enable_caching or same_step_hits:
        raise ValueError(
            f"expected enable_caching=True and same_step_hits=False with sub_block_hits=True, got {enable_caching} and "
            f"{same_step_hits}; a page is copied before the step writes"
        )
    if use_eagle:
        raise NotImplementedError("sub_block_hits does not work with use_eagle=True, which drops whole blocks")
