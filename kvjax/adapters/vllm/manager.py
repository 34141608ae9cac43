"""vLLM's KVCacheManager over that of kvjax.core: the same calls with the same objects, and the same answers.

Flow:    vLLM's Scheduler -> [KVCacheManager] -> kvjax.core.KVCacheManager -> KVCacheBlocks, vLLM's events and stats
Source:  names and semantics of vLLM v1/core/kv_cache_manager.py, by release; docs/vllm.md

Blocks are kvjax's `KVCacheBlocks` and `KVCacheBlock`, which have vLLM's methods and attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from kvjax.adapters.policy import STACK, with_policy
from kvjax.adapters.vllm.block_pool import BlockPool
from kvjax.adapters.vllm.boundary_states import BoundaryStates
from kvjax.adapters.vllm.config import check_retention, translate_config
from kvjax.adapters.vllm.coordinator import coordinator_class
from kvjax.adapters.vllm.description import vllm_module
from kvjax.adapters.vllm.events import EventClasses
from kvjax.adapters.vllm.release import Release, installed_release
from kvjax.adapters.vllm.requests import KnownRequests
from kvjax.adapters.vllm.residency import forward_residency
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.manager.kv_cache_manager import KVCacheManager as CoreManager
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.core.spec import cdiv


class KVCacheManager:
    """What vLLM's scheduler calls. Used from one thread.

    Arguments are those of the installed release's class, by position or name. `install` sets whose rules
    decide what is kept and evicted (`policy`, see `kvjax.adapters.policy`), and fields of `kvjax.core.ManagerOptions`
    in place of these (`core_options`).
    """

    policy: ClassVar[str] = STACK
    core_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """An empty cache.

        Raises:
            MissingStackError: vLLM is not installed.
            UnknownStackError: its version is unknown, or an object differs from what was recorded of it.
            NotImplementedError: a kind or an option has no counterpart in kvjax.core.
            ValueError: sizes do not fit together.
        """
        release = installed_release()
        given = release.bind("__init__", args, kwargs)
        if given.get("num_hash_lookahead_tokens") and given["enable_kv_cache_events"]:
            raise NotImplementedError(
                f"vllm {release.name}: num_hash_lookahead_tokens={given['num_hash_lookahead_tokens']!r} with KV events "
                "has no counterpart in kvjax.core"
            )
        config = given["kv_cache_config"]
        self._release = release
        self._rules = release.rules
        check_retention(config, given)
        collector = given["metrics_collector"]
        self._core = core = CoreManager(
            translate_config(config, release, given["dcp_world_size"]),
            given["max_model_len"],
            given["hash_block_size"],
            with_policy(self.policy, _core_options(given, release)),
            metrics_collector=None if collector is None else forward_residency(collector),
            **self.core_options,
        )
        self._requests = KnownRequests(release, core.request_table, bool(given["enable_kv_cache_events"]))
        self._running = self._requests.running
        self._knows_in_flight = "num_in_flight_tokens" in release.rules.request_attributes
        self._is_told_of_steps = "new_step_starts" in release.description["methods"]["KVCacheManager"]
        # Of the last computed tokens so many may be computed again (drafting heads that look ahead): not cached yet.
        # Hashes that cover what lies ahead prove it settled in a hybrid.
        is_proved = bool(given.get("num_hash_lookahead_tokens")) and core.groups.num_groups > 1
        num_looked_ahead = max(given.get("num_prefill_lookahead", 0) - 1, 0)
        self._num_unsettled = 0 if is_proved and core.groups.has_inner_hits else num_looked_ahead
        self._events = EventClasses(release)
        self._make_copy = _copy_class(release)
        self._make_stats = vllm_module("vllm.v1.metrics.stats").PrefixCacheStats
        self.max_model_len = given["max_model_len"]
        self.enable_caching = bool(given["enable_caching"])
        self.use_eagle = given["use_eagle"]
        self.log_stats = given["log_stats"]
        self.enable_kv_cache_events = given["enable_kv_cache_events"]
        self.metrics_collector = given["metrics_collector"]
        self.prefix_cache_stats = self._make_stats() if self.log_stats else None
        self._zeroes = bool(getattr(config, "needs_kv_cache_zeroing", False))
        self._to_zero: list[int] = []  # pages, beside those that the core has waiting
        self.kv_cache_config = config
        self.num_kv_cache_groups = len(config.kv_cache_groups)
        self.empty_kv_cache_blocks = core.empty_kv_cache_blocks
        self.watermark_blocks = int(given.get("watermark", 0.0) * config.num_blocks)
        self.block_pool = BlockPool(
            core.block_pool, core.reset_prefix_cache, self.take_events, self._events.translate, self._in_blocks_of
        )
        make_coordinator = coordinator_class(self.enable_caching, self.num_kv_cache_groups)
        self.coordinator = make_coordinator(core, config, self.block_pool, num_looked_ahead)
        is_eagle = bool(given["use_eagle"]) or any(
            getattr(group, "is_eagle_group", False) for group in config.kv_cache_groups
        )
        self.mamba_shared_prefix_checkpoint = (
            bool(given.get("enable_mamba_shared_prefix_checkpoint"))
            and is_eagle
            and core.groups.has_inner_hits
            and num_looked_ahead == 0
        )
        if self.mamba_shared_prefix_checkpoint:
            core.groups.keep_shared_tails()
        self._boundary_states = BoundaryStates(core) if self.coordinator.has_states else None

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return self._core.usage

    # Hits.

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether a request is looked up at all."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, ...]:
        """The longest cached prefix: blocks and tokens, and from 0.33 on the length that other groups have cached.

        Raises:
            UnknownStackError: the request lacks an attribute.
        """
        longest = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        blocks, num_tokens = self.empty_kv_cache_blocks, 0
        if longest > 0 and self.prefix_cache_lookup_enabled(request):
            blocks, num_tokens = self._core.get_computed_blocks(self._requests.make(request, longest + 1))
        if self._rules.counts_lookups:
            self.record_prefix_cache_stats(request, num_tokens)
        if not self._rules.tells_shared_prefix:
            return blocks, num_tokens
        shared = blocks.num_shared_tokens
        if self.coordinator.has_states and not shared and longest > 0 and self.prefix_cache_lookup_enabled(request):
            _, _, shared = self._core.coordinator.find_longest_cache_hit(request.block_hashes, longest)
        return blocks, num_tokens, shared if shared > num_tokens else 0

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, ...]:
        """`get_computed_blocks`, and whether the hit is that of all groups but those of states.

        A connector may bring the state at its end. Then the blocks of such a group are its own shorter hit, and nulls.
        """
        coordinator, longest = self.coordinator, max_cache_hit_length
        if coordinator.has_states and self.prefix_cache_lookup_enabled(request):
            longest = request.num_tokens - 1 if longest is None else longest
            hit, lengths = coordinator.find_longest_cache_hit_per_group(request.block_hashes, longest)
            num_tokens = lengths[coordinator.full_attention_group_id or 0]
            is_deeper = num_tokens == max(lengths) > min(lengths)
            if is_deeper and coordinator.lags_by_states_alone(lengths, num_tokens):
                columns = [num_tokens // manager.block_size for manager in coordinator.single_type_managers]
                null = self.block_pool.null_block
                padded = [[*blocks, *[null] * (n - len(blocks))] for blocks, n in zip(hit, columns, strict=True)]
                return self.create_kv_cache_blocks(padded), num_tokens, 0, True
        return (*self.get_computed_blocks(request, max_cache_hit_length), False)

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """The blocks of a hit's first tokens; where a group of states has fewer, a connector brings the state.

        Raises:
            AssertionError: the tokens end inside a block, or another group has fewer, as in vLLM.
        """
        managers = self.coordinator.single_type_managers
        groups = self._core.kv_cache_config.kv_cache_groups
        parts: list[Sequence[Any]] = []
        for found, manager, group in zip(blocks.blocks, managers, groups, strict=True):
            end, rest = divmod(num_computed_tokens, manager.block_size)
            spec = group.kv_cache_spec
            if spec.is_prefix_cacheable and (rest or (spec.state_pages is None and end > len(found))):
                raise AssertionError(
                    f"expected tokens of whole blocks of {manager.block_size} that are hit, got {num_computed_tokens}"
                )
            parts.append(found[:end])
        return self.create_kv_cache_blocks(parts)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Counts a lookup."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            preempted = request.num_preemptions > 0
            self.prefix_cache_stats.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=preempted)

    def make_prefix_cache_stats(self) -> Any:
        """Lookups since the last call, as vLLM's PrefixCacheStats; None without `log_stats`."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = self._make_stats()
        return stats

    # Slots.

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> KVCacheBlocks | None:
        """Slots for a request's next tokens: new blocks per group, or None if they do not fit.

        Raises:
            ValueError: no tokens at all, or a hit that is not of this manager or not cached any more.
            UnknownStackError: the request lacks an attribute.
        """
        known = self._running.get(request.request_id)
        delays = delay_cache_blocks or self._num_unsettled > 0
        if known is None:
            kept_free = self.watermark_blocks if has_scheduled_reqs else 0
            made = self._requests.make(request, request.num_tokens)
            hit = new_computed_blocks
            if hit is not None and not isinstance(hit, KVCacheBlocks):
                hit = self.create_kv_cache_blocks(hit.blocks)
            keeps_shared = self._core.groups.retention is not None or self._core.row_blocks.inner is not None
            if self._rules.tells_shared_prefix and keeps_shared:
                hit = self._with_shared_prefix(hit, request.shared_prefix_boundary)
            # What counts as computed without blocks here comes from outside, as a connector's tokens do.
            external = num_external_computed_tokens + request.num_computed_tokens
            computed = num_new_computed_tokens + external
            if full_sequence_must_fit and not self._core.can_admit(made, computed, hit, kept_free, num_encoder_tokens):
                return None
            blocks = self._core.allocate_slots(
                made,
                min(num_new_tokens, self.max_model_len - computed),
                num_new_computed_tokens,
                hit,
                num_lookahead_tokens,
                external,
                delays,
                num_encoder_tokens,
                num_kept_free=kept_free + reserved_blocks,
            )
            if blocks is None:
                return None
            known = made
            self._requests.admit(request.request_id, known)
            if self._zeroes and external:
                self._zero_loaded_pages(request.request_id, hit, computed, skip_zeroing_group_ids)
        else:
            computed = request.num_computed_tokens
            self._requests.sync(known, request)
            blocks = self._core.allocate_slots(
                known,
                min(num_new_tokens, self.max_model_len - computed),
                num_lookahead_tokens=num_lookahead_tokens,
                delay_cache_blocks=delays,
                num_in_flight_tokens=request.num_in_flight_tokens if self._knows_in_flight else 0,
                full_sequence_must_fit=full_sequence_must_fit,
            )
        if blocks is not None:
            if delays and not delay_cache_blocks:
                self.cache_blocks(request, computed + num_new_tokens)
            if self._boundary_states is not None:
                self._boundary_states.note(known)
        return blocks

    def _with_shared_prefix(self, hit: KVCacheBlocks | None, num_tokens: int) -> KVCacheBlocks:
        """The same hit of a request that shares so many tokens, cached by some groups only: vLLM's request says so."""
        hit = self.empty_kv_cache_blocks if hit is None else hit
        if hit.num_shared_tokens == num_tokens:
            return hit
        return KVCacheBlocks(hit.block_ids, hit.pools, num_tokens, hit.found)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Registers the full blocks of the first tokens, after `delay_cache_blocks`."""
        known = self._running.get(request.request_id)
        if known is not None:
            self._requests.sync(known, request)
            settled = max(min(num_computed_tokens, request.num_tokens) - self._num_unsettled, 0)
            self._core.cache_blocks(known, settled)
            if self._boundary_states is not None:
                self._boundary_states.note(known)

    def free(self, request: Any) -> None:
        """Frees all blocks of a request, its last first; one that holds none changes nothing."""
        known = self._running.pop(request.request_id, None)
        if known is not None:
            if self._boundary_states is not None:
                self._boundary_states.forget(known)
            self._core.free(known)

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int = 0,
        num_prompt_tokens: int | None = None,
        processed_computed_tokens: int | None = None,
    ) -> None:
        """Frees what no token after the first computed ones attends to; the release's name of their number binds."""
        if request_id in self._running:
            computed = total_computed_tokens if processed_computed_tokens is None else processed_computed_tokens
            self._core.remove_skipped_blocks(request_id, computed)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Ends a request but holds its blocks, until `block_pool.free_blocks` gets them, the last first."""
        known = self._running.pop(request.request_id, None)
        if known is None:
            return []
        groups = self._core.get_blocks(request.request_id).blocks
        blocks = [block for group in groups for block in group if not block.is_null]
        self.block_pool.hold(blocks)
        if self._boundary_states is not None:
            self._boundary_states.forget(known)
        self._core.free(known)
        return blocks

    # The cache as a whole.

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forgets the hashes of blocks, held or free.

        Raises:
            AssertionError: an id is none of the pool, as in vLLM.
        """
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes; False while any block is held."""
        done = self._core.reset_prefix_cache()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    def _in_blocks_of(self, request: Any, block_size: int) -> tuple[Request, Sequence[BlockHash]]:
        """A request as kvjax's, in no table, and its hashes at a block size."""
        hashes = self._core.groups.hashing.of_block_size(request.block_hashes, block_size)
        return self._requests.make(request, request.num_tokens), hashes

    def take_events(self) -> list[Any]:
        """KV events since the last call, as vLLM's classes. Where nobody tells of steps, one has ended by then."""
        if not self._is_told_of_steps:
            self._core.new_step_starts()
        return [self._events.translate(event) for event in self._core.take_events()]

    def new_step_starts(self) -> None:
        """Lets lookups hit recurrent states that the last step computed."""
        self._core.new_step_starts()

    # Reading.

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group the leading blocks that all running requests share."""
        if not self._rules.shares_prefixes or running_request_id not in self._running:
            return [0] * self.num_kv_cache_groups
        return self._core.get_num_common_prefix_blocks(running_request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request; none of an unknown one."""
        return self._core.get_blocks(request_id) if request_id in self._running else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Per group the ids of a request's blocks."""
        ids = self.get_blocks(request_id).get_block_ids()
        assert ids is not None  # only with allow_none
        return ids

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Per group the ids of the blocks of the first tokens; all of kinds that hold no tokens or the encoder's."""
        clipped = []
        groups, theirs = self._core.kv_cache_config.kv_cache_groups, self.kv_cache_config.kv_cache_groups
        for ids, group, own in zip(self.get_block_ids(request_id), groups, theirs, strict=True):
            spec = group.kv_cache_spec
            holds_tokens = spec.state_pages is None and not spec.reads_encoder
            clipped.append(ids[: cdiv(num_computed_tokens, own.kv_cache_spec.block_size)] if holds_tokens else ids)
        return tuple(clipped)

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens up to the last hashed block of a request, the least over all groups that are cached."""
        groups = self._core.kv_cache_config.kv_cache_groups
        lengths = []
        for blocks, group in zip(self.get_blocks(request.request_id).blocks, groups, strict=True):
            if not group.kv_cache_spec.reads_encoder:
                hashed = [column + 1 for column, block in enumerate(blocks) if block.block_hash is not None]
                lengths.append(max(hashed, default=0) * group.kv_cache_spec.block_size)
        return min(lengths, default=0)

    # What a step has the device do beside attention.

    def take_new_block_ids(self) -> list[int]:
        """Pages to zero before the next step, since the last call."""
        self._collect_new_pages()
        pages, self._to_zero = self._to_zero, []
        return pages

    def _collect_new_pages(self) -> None:
        self._to_zero += [page for pages in self._core.take_pages_to_zero() for page in pages.tolist()]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Has the pages of a request's tokens from `start_token` on, which is where blocks start, zeroed."""
        managers = self.coordinator.single_type_managers if self._zeroes else ()
        for ids, manager in zip(self.get_block_ids(request_id), managers, strict=False):
            if manager.zeroes_pages:
                self._to_zero += [block_id for block_id in ids[start_token // manager.block_size :] if block_id]

    def _zero_loaded_pages(
        self, request_id: str, hit: KVCacheBlocks | None, num_computed_tokens: int, kept_group_ids: Sequence[int]
    ) -> None:
        """Has pages of computed tokens behind the hit zeroed: vLLM loads them after that, but in the groups kept."""
        found, held = (hit or self.empty_kv_cache_blocks).block_ids, self.get_block_ids(request_id)
        self._collect_new_pages()  # a group that is not cached has its loaded pages among them
        for group_id, ids in enumerate(held):
            end = cdiv(num_computed_tokens, self.coordinator.single_type_managers[group_id].block_size)
            loaded = [page for page in ids[found[group_id].size : end] if page]
            self._to_zero = [page for page in self._to_zero if page not in loaded]
            self._to_zero += [] if group_id in kept_group_ids else loaded

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Pages to copy before the next step writes, and blocks to free once it has: both ends of each copy."""
        copies, held = self._core.block_pool.page_edits.lend_copies()
        pairs = zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True)
        blocks = [self._core.block_pool.blocks[block_id] for block_id in held.tolist()]
        return [self._make_copy(src_block_id=source, dst_block_id=to) for source, to in pairs] if blocks else [], blocks

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """By request the states that were cached since the last call, for a connector: group, block, tokens."""
        return {} if self._boundary_states is None else self._boundary_states.take()

    def finalize_partial_tail_offloads(self, request: Any) -> list[Any]:
        """The registered state of a partly filled block of a request that ends there: group, block, tokens."""
        known = self._running.get(request.request_id)
        if known is None or self._boundary_states is None:
            return []
        offers = self._boundary_states.take_tails(known)
        is_settled = not request.num_in_flight_tokens
        return [offer for offer in offers if is_settled and offer[2] == request.num_computed_tokens]

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[Any]]) -> KVCacheBlocks:
        """Per group blocks as a value; the shared empty one if there are none."""
        return self._core.create_kv_cache_blocks([[block.block_id for block in group] for group in blocks])


def _copy_class(release: Release) -> Any:
    """vLLM's value of a page copy; None where the release has none."""
    if "take_kv_cache_block_copies" not in release.description["methods"]["KVCacheManager"]:
        return None
    return vllm_module("vllm.v1.core.kv_cache_utils").KVCacheBlockCopy


def _core_options(given: Mapping[str, Any], release: Release) -> ManagerOptions:
    """Options of kvjax's manager, of what vLLM's is made with."""
    config, rules = given["kv_cache_config"], release.rules
    options = ManagerOptions.vllm(rules.preset)
    return replace(
        options,
        rules=replace(options.rules, inner_hits_of_units=given.get("dcp_world_size", 1) > 1 and rules.shards_by_group),
        num_hash_lookahead_tokens=given.get("num_hash_lookahead_tokens", 0),
        enable_caching=bool(given["enable_caching"]),
        use_eagle=bool(given["use_eagle"]),
        enable_kv_cache_events=bool(given["enable_kv_cache_events"]),
        dcp_world_size=1 if rules.shards_by_group else given["dcp_world_size"],
        pcp_world_size=1 if rules.shards_by_group else given["pcp_world_size"],
        max_in_flight_tokens=given.get("max_in_flight_tokens", given.get("max_num_batched_tokens")),
        zero_new_pages=bool(getattr(config, "needs_kv_cache_zeroing", False)),
        retention_interval=getattr(config, "prefix_cache_retention_interval", None),
    )


__all__ = ["KVCacheManager"]
