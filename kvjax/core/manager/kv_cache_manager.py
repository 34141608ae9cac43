"""The KV cache of a deployment for its scheduler: prefix hits, slots for new tokens, and blocks freed.

Flow:    Request -> [KVCacheManager] -> block ids, block tables -> StepPlan; sampled tokens come back to the Request
Source:  names and semantics of vLLM v1/core/kv_cache_manager.py

A request's life, each arrow one call:

    unknown --allocate_slots--> running --allocate_slots | plan_step--> running --free--> unknown

`get_computed_blocks` asks for a hit before the first `allocate_slots`; preemption is `free` and
`num_computed_tokens = 0`. The caller advances `num_computed_tokens` after each step. What is planned is dispatched, or
taken back by `take_back_step`: its blocks are hits already.

Invariants (`check_invariants`):

    M1  a block's references are its entries in all block tables, and those that copies and pins hold outside them
    M2  every row with blocks is owned by a request of the table
    M3  up to `idle_until` slots (row_blocks.py) a row has nothing to allocate, register or release
    and those of the pools, the groups and the request table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.manager_settings import ManagerSettings
from kvjax.core.manager.block_needs import BlockNeeds
from kvjax.core.manager.block_registrar import BlockRegistrar
from kvjax.core.manager.coordinator import get_kv_cache_coordinator
from kvjax.core.manager.draft_settler import DraftSettler
from kvjax.core.manager.forks import Forks
from kvjax.core.manager.inner_block_hits import InnerBlockHits
from kvjax.core.manager.inner_coordinator import InnerKVCacheCoordinator
from kvjax.core.manager.make_pools import make_pools
from kvjax.core.manager.manager_reader import ManagerReader
from kvjax.core.manager.pins import PinnedPrefix, Pins
from kvjax.core.manager.prefix_cache_control import PrefixCacheControl
from kvjax.core.manager.prefix_hits import PrefixHits
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.manager.slot_allocator import SlotAllocator, SlotCounts
from kvjax.core.manager.step_planner import StepPlanner
from kvjax.core.manager.step_take_back import StepTakeBack
from kvjax.core.manager.sub_block_hits import SubBlockHits
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.pool.cache_tier import CacheTier
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.hasher_check import HasherCheck
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.save.manager_state import SavableManager
from kvjax.core.slabs.slab_memory import SlabMemory
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepResult, TableUpdate
from kvjax.core.tables.token_counts import MOST_TOKENS, as_count
from kvjax.core.watch.kv_events import KVCacheEvent, KVEventLog
from kvjax.core.watch.prefix_cache_stats import PrefixCacheStats
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector


class KVCacheManager(ManagerReader, PrefixCacheControl, SavableManager):
    """Block tables and prefix cache of all groups. Used from one thread; a call that raises has changed nothing."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        options: ManagerOptions | None = None,
        *,
        metrics_collector: KVCacheMetricsCollector | None = None,
        miss_reasons: MissReasons | None = None,
        tier: CacheTier | None = None,
        **named_options: Any,
    ) -> None:
        """An empty cache.

        Args:
            kv_cache_config: pools and groups.
            max_model_len: most tokens of one request.
            hash_block_size: tokens of one `Request.block_hashes` entry; divides every group's block size.
            options: what the manager does one way or another; None: the defaults.
            metrics_collector: samples how long blocks stay.
            miss_reasons: explains every lookup, see there.
            tier: keeps blocks beyond the pools: it sees cached ones before they are reused, and hits tell what it could
                load (`KVCacheBlocks.elsewhere`).
            named_options: fields of `ManagerOptions`, in place of those of `options`.

        Raises:
            TypeError: a name is none of an option.
            ValueError: a size is below 1, `hash_block_size` does not divide a block size, a spec has no manager,
                `retention_interval` is no multiple of every block size, or as `ManagerOptions`.
            NotImplementedError: a kind does not work with EAGLE, context parallelism, a tier or `sub_block_hits`, or
                `sub_block_hits` with EAGLE or `retention_interval`.
        """
        self.kv_cache_config = kv_cache_config
        self.max_model_len = as_count("max_model_len", max_model_len, least=1)
        self.hash_block_size = as_count("hash_block_size", hash_block_size, least=1)
        options = self.options = (options or ManagerOptions()).replaced(named_options)
        _check_sinks(kv_cache_config, has_tier=tier is not None, has_sub_block_hits=options.sub_block_hits)
        self.enable_caching, self.enable_kv_cache_events = options.enable_caching, options.enable_kv_cache_events
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.miss_reasons = miss_reasons
        self._event_log = KVEventLog()
        settings = ManagerSettings(
            max_model_len=self.max_model_len, hash_block_size=self.hash_block_size, options=options
        )
        self.block_pools = make_pools(kv_cache_config, settings, self._event_log, metrics_collector, tier)
        slabs = kv_cache_config.slabs
        if slabs is not None and options.reserve:
            raise NotImplementedError("expected reserve=False where pools share slabs: held blocks may lie scattered")
        self.slabs = None if slabs is None else SlabMemory(slabs, self.block_pools)
        self.groups = GroupManagers(kv_cache_config, self.block_pools, settings)
        self.empty_kv_cache_blocks = self.groups.no_blocks
        has_inner_hits = self.groups.has_inner_hits
        self.coordinator = (
            InnerKVCacheCoordinator(self.groups) if has_inner_hits else get_kv_cache_coordinator(self.groups)
        )
        self.request_table = RequestTable(options.max_num_reqs, self.max_model_len)
        self._make_parts()

    def _make_parts(self) -> None:
        groups, table, options = self.groups, self.request_table, self.options
        needs = self.block_needs = BlockNeeds(groups, self.slabs)
        in_flight = groups.settings.max_in_flight_tokens
        self.reservations = Reservations(self.block_pools, in_flight) if options.reserve else None
        self.row_blocks = RowBlocks(groups, needs, table, self.reservations)
        sub_block_hits = SubBlockHits(groups, self.kv_cache_config) if options.sub_block_hits else None
        self._hasher_check = HasherCheck(self.hash_block_size, publishes_hashes=options.enable_kv_cache_events)
        if self.miss_reasons is not None:
            self.miss_reasons.attach(groups)
        self._hits = PrefixHits(groups, self.coordinator, sub_block_hits, self._hasher_check, self.miss_reasons)
        inner_hits = InnerBlockHits(groups) if groups.has_inner_hits else None
        hits_inside = sub_block_hits if inner_hits is None else inner_hits
        self._slots = SlotAllocator(groups, needs, self.row_blocks, table, self.reservations, hits_inside)
        registrar = BlockRegistrar(groups, table)
        self._planner = StepPlanner(groups, self.row_blocks, registrar, table, self.reservations)
        self._drafts = DraftSettler(groups, self.row_blocks, registrar, table)
        self._step_take_back = StepTakeBack(groups, self.row_blocks, table)
        self._forks = Forks(groups, needs, self.row_blocks, table, self.reservations)
        self.pins = Pins(groups, needs, self.reservations)

    # -- hits -------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest prefix of the request that is cached, at most all tokens but the last.

        Nothing is held yet: pass the result to `allocate_slots` before any other call that allocates.

        Returns:
            Its blocks per group, and its tokens; with `sub_block_hits` the last blocks may be used in part. With a
            `tier` the blocks' `elsewhere` says what could be loaded behind them.

        Raises:
            ValueError: the request was hashed with another block size.
        """
        return self._hits.find(request)

    def can_admit(
        self,
        request: Request,
        num_hit_tokens: int = 0,
        hit_blocks: KVCacheBlocks | None = None,
        kept_free: int | Sequence[int] = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Whether every pool keeps `kept_free` blocks free once all tokens of a new request have theirs.

        Counted as `full_sequence_must_fit` does, as far as the admission cap of each kind; changes nothing.

        Args:
            request: not running.
            num_hit_tokens: tokens of the hit that it would start from.
            hit_blocks: blocks of that hit; None: none.
            kept_free: blocks of each pool, or one number for all.
            num_encoder_tokens: tokens of the encoder, for kinds that attend to them.

        Raises:
            ValueError: a number is negative, or there is not one per pool.
        """
        return self._slots.can_admit(request, num_hit_tokens, hit_blocks, kept_free, num_encoder_tokens)

    def new_step_starts(self) -> None:
        """Lets lookups hit what earlier steps computed; call it once before each step with `same_step_hits=False`."""
        self.groups.new_step_starts()
        self._note_step_planned()

    @property
    def smallest_reusable_prefix(self) -> int:
        """Tokens of the shortest hit that there can be: hits are multiples of it; 0 without prefix caching."""
        return self._hits.smallest

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
        num_kept_free: int = 0,
    ) -> KVCacheBlocks | None:
        """Slots for the tokens of a request's next step.

            | computed | new_computed | external |  new  | lookahead |
            |          |    a hit     |  loaded  | to be computed    |
                                      |   slots are taken from here  |

        First the blocks that left the windows are released; if the rest then does not fit, nothing else has happened.
        Blocks that the tokens up to `new` fill become prefix hits, those of tokens that the request does not have yet
        (drafts, tokens in flight) excepted.

        Args:
            request: running here, or new: then it gets a row.
            num_new_tokens: to be computed in this step; 0 only with a hit, or while external tokens are loaded.
            num_new_computed_tokens: of a new request, tokens of the hit.
            new_computed_blocks: of a new request, blocks of the hit.
            num_lookahead_tokens: drafted tokens that need slots too, as far as `max_model_len` allows.
            num_external_computed_tokens: of a new request, tokens after the hit that come from outside; where the hit
                ends inside a block, they are to be written there after the step's page copies. Their pages are never
                zeroed, so they may be written at any time. If they do not come, `free` the request and begin anew.
            delay_cache_blocks: register no block (its KV arrives later; then call `cache_blocks`).
            num_encoder_tokens: of a new request, tokens of the encoder, for kinds that attend to them.
            num_in_flight_tokens: computed tokens of steps not read yet: they may be taken back, so windows keep what
                they see.
            full_sequence_must_fit: refuse unless the blocks of all tokens of the request, as far as the admission cap
                of each kind counts them, are free.
            num_kept_free: of a new request, blocks of each pool that stay free beside what this step takes; running
                ones take what there is.

        Returns:
            Per group the new blocks (those of external tokens not among them), or None: they do not fit.

        Raises:
            ValueError: counts that are negative, no integers or do not fit together, more tokens than `max_model_len`,
                a hit for a running request, another request of the same id, a step that recurrent groups can not take
                (`limit_step`).
            BlockStateError: a block of the hit no longer caches these tokens: look the request up again.
        """
        row, table, idle_until = request.row, self.request_table, self.row_blocks.idle_until
        if (
            0 <= row < idle_until.size
            and table.requests[row] is request
            and new_computed_blocks is None
            and num_new_tokens > 0
            and num_lookahead_tokens >= 0
            and num_in_flight_tokens >= 0
            and not (num_new_computed_tokens or num_external_computed_tokens or num_encoder_tokens)
            and not full_sequence_must_fit
        ):
            slots = table.num_computed_tokens.item(row) + num_new_tokens + num_lookahead_tokens
            most = slots + num_in_flight_tokens
            if type(most) is int:
                if slots <= idle_until.item(row):
                    return self.empty_kv_cache_blocks
                if most <= MOST_TOKENS:
                    ids = self._slots.extend(
                        request, row, num_new_tokens, num_lookahead_tokens, num_in_flight_tokens, delay_cache_blocks
                    )
                    return None if ids is None else self.groups.blocks(ids)
        counts = SlotCounts(
            num_new_tokens,
            num_new_computed_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
            num_in_flight_tokens,
            num_kept_free,
        ).as_ints()
        self._hasher_check.check_hasher(request)
        ids = self._slots.allocate(request, counts, new_computed_blocks, delay_cache_blocks, full_sequence_must_fit)
        if row < 0 and ids is not None:
            self._hits.note_admission(request)
        return None if ids is None else self.groups.blocks(ids)

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

        Stops at the first row that does not fit (of which only the blocks outside its windows were released):
        preempt a request, and call again with the rows from `num_planned` on.

        Raises:
            ValueError: a row that no request owns or that comes twice, counts out of range, more tokens than
                `max_model_len`, or a step that recurrent groups can not take (`limit_step`).
        """
        return self._planner.plan(rows, num_new_tokens, num_lookahead_tokens, num_in_flight_tokens, delay_cache_blocks)

    def limit_drafts(self, rows: npt.ArrayLike, num_drafts: npt.ArrayLike) -> np.ndarray:  # int64[n]
        """How many of int64[n] drafts the rows' next step may verify, behind one token whose slot is allocated.

        All of them, but where drafts are in the rings of recurrent states (`RingStateSpec`): such a step ends where the
        state's page does.

        Raises:
            ValueError: a row that no request owns or that comes twice, or counts that are negative.
        """
        return self._drafts.limit(rows, num_drafts)

    def settle_drafts(self, rows: npt.ArrayLike, num_rejected: npt.ArrayLike) -> tuple[TableUpdate, ...]:
        """Takes the last computed tokens of rows back: drafts that the step which computed them rejected.

        Call it for all rows of a step that had drafts, rejected or not, once the step is read and the requests have
        their new tokens. The blocks that accepted drafts filled then become prefix hits; what is appended later is
        registered by the next plan, if no window has released it. Call it before the rows are planned, forked or freed;
        a row planned earlier needs `num_in_flight_tokens`, so that windows keep what may be read again.

        `num_computed_tokens` falls, blocks stay with their rows. In a row of a recurrent group the block that has the
        state after the last accepted token takes the place of its column, so that the next step reads it: nothing is
        copied.

        Args:
            rows: integer[n] distinct rows of running requests.
            num_rejected: integer[n] or one integer, drafts of each, >= 0.

        Returns:
            Per group the entries of its block table that changed, for a table mirrored on the device.

        Raises:
            ValueError: a row that no request owns or that comes twice, counts that are negative, leave no computed
                token, take back tokens whose blocks are cached, or are more than a recurrent group has states for.
        """
        return self._drafts.settle(rows, num_rejected)

    def limit_step(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
    ) -> int:
        """How many of the new tokens one step should take so that recurrent states are cached right.

        All of them where no group is recurrent. Else steps of a prompt end where blocks end, and at the checkpoints of
        `retention_interval`; for a new request the hit's blocks tell of one. 0 if the tokens do not reach the end of a
        block: wait for a larger budget.

        Raises:
            ValueError: a count is negative or no integer.
        """
        return self._slots.limit_step(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Registers the full blocks of the first `num_computed_tokens` tokens, after `delay_cache_blocks`.

        Raises:
            UnknownRequestError: the manager does not hold the request.
            ValueError: more tokens than the request's blocks hold.
        """
        self._slots.cache_blocks(request, num_computed_tokens)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token after the first `num_computed_tokens` attends to.

        Raises:
            UnknownRequestError: the manager holds no such request.
            ValueError: a negative number of tokens.
        """
        row = self.request_table.row_of(request_id)
        self.row_blocks.remove_skipped(row, as_count("num_computed_tokens", num_computed_tokens))

    def free(self, request: Request) -> None:
        """Gives all blocks of a request back, its last block first, and its row. What is cached stays a hit.

        Raises:
            UnknownRequestError: the manager does not hold the request (it was freed before, for example).
        """
        row = self.row_blocks.row_of(request)
        if self.groups.on_probation:
            self.row_blocks.keep_ends(request, row)
        self.row_blocks.free(row)
        self.request_table.release(request)
        self._note_step_planned()

    # -- forks and pins -----------------------------------------------------------------------------------------------

    def fork(
        self, request: Request, n: int, *, request_ids: Sequence[str] | None = None, num_in_flight_tokens: int = 0
    ) -> tuple[Request, ...] | None:
        """`n` running requests more with the tokens of a running one: several samples of a prompt, or beams.

        Children share all of the request's blocks of computed tokens, a partly filled last one included. That one is
        copied, one page per group, for each request that then writes to it while others still hold it, the parent
        like the children; `take_page_copies` tells. Only blocks for drafts of recurrent kinds are taken here. Full
        blocks become prefix hits, if they are not yet and the request registers any.

        Call it when the step that computes the request's tokens is dispatched and `num_computed_tokens` advanced, not
        while a step of the request is being planned.

        Args:
            request: running here.
            n: children, at least 1.
            request_ids: theirs; None: `<id>.1`, `<id>.2`, ... with numbers behind all that ids of requests which ever
                had blocks here end in. So they are nobody's, running, preempted or gone; of requests that were never
                admitted the manager knows nothing: whoever names those so names the children too.
            num_in_flight_tokens: the last computed tokens that children shall not share: drafts that may be taken
                back, or tokens that they compute for themselves.

        Returns:
            The children, or None: with `reserve=True` their worst cases do not fit beside what runs, or blocks for
            drafts are missing.

        Raises:
            UnknownRequestError: the manager does not hold the request.
            ValueError: `n` or a count is out of range, ids repeat or are in use, nothing is computed, or windows have
                released blocks that the children would need.
            NotImplementedError: in-flight tokens with a kind that has one state for all tokens.
        """
        return self._forks.fork(request, n, request_ids, num_in_flight_tokens)

    def take_page_copies(self) -> tuple[PageCopies, ...]:
        """Per pool the pages to copy before the next step writes anything, since the last call; once per step.

        All sources are to be read before any destination is written. Their blocks are held until this call, so put
        the copies into the step that is being planned: `build_step_plan` does.
        """
        self._note_step_planned()
        return tuple(pool.page_edits.take_copies() for pool in self.block_pools)

    def _note_step_planned(self) -> None:
        for pool in self.block_pools:
            pool.eviction_policy.note_step_planned()
        if self.slabs is not None:
            self.slabs.note_step_planned()

    def take_pages_to_zero(self) -> tuple[np.ndarray, ...]:  # int32[Z] each
        """Per pool the pages to zero after the copies of the next step, since the last call; once per step.

        None without `zero_new_pages`; else those of all new blocks that neither a copy nor external tokens fill.
        """
        return tuple(pool.page_edits.take_pages_to_zero() for pool in self.block_pools)

    def pin(self, request: Request, longest_request: int | None = None) -> PinnedPrefix | None:
        """Keeps the longest cached prefix of a request's tokens in the cache until `unpin`, running or not.

        Requests that start with the same tokens, and have more, hit it. Pinned blocks count as held: while there are
        any, `reset_prefix_cache` refuses. `evict_blocks` and `invalidate` make them no hits, and they stay held.

        Args:
            request: with all the tokens that are to be hit.
            longest_request: tokens of the longest request that must find room beside all pins; None: `max_model_len`.

        Returns:
            What is pinned, or None: nothing of it is cached.

        Raises:
            ValueError: `longest_request` is below 1, or the request was hashed with another block size.
            OutOfBlocksError: a pool would have fewer blocks left than such a request may need, or than the running
                requests have reserved. Nothing is changed.
        """
        longest = self.max_model_len if longest_request is None else as_count("longest_request", longest_request, 1)
        hits, num_tokens = self._hits.find_to_pin(request)
        return self.pins.add(hits, num_tokens, longest) if num_tokens else None

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Lets a pinned prefix go; what no request holds may be evicted, its last block first.

        Raises:
            BlockStateError: the prefix is not pinned here. Nothing is changed.
        """
        self.pins.remove(prefix)

    # -- what happened ------------------------------------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of all pools since the last call, oldest first."""
        return self._event_log.take()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Lookups of the requests admitted since the last call, each once; None without `log_stats`."""
        return self._hits.take_stats()


def _check_sinks(kv_cache_config: KVCacheConfig, has_tier: bool, has_sub_block_hits: bool) -> None:
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        num_sink_tokens = group.kv_cache_spec.num_sink_tokens
        if num_sink_tokens and (has_tier or has_sub_block_hits):
            raise NotImplementedError(
                f"group {group_id}: windows with num_sink_tokens > 0 work neither with a tier nor with "
                f"sub_block_hits, got num_sink_tokens={num_sink_tokens}"
            )
