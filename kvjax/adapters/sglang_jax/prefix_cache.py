"""sglang-jax's prefix cache over kvjax's pools: hashes of pages instead of a radix tree, references instead of locks.

Flow:    Scheduler, ScheduleBatch -> [PrefixCache] -> RankPages -> BlockPool -> events
Source:  BasePrefixCache, RadixCache and SWARadixCache of sgl-project/sglang-jax, srt/mem_cache

A request's pages change hands as in the stack:

    match_prefix          names the longest cached prefix; nobody holds it
    inc_lock_ref          the scheduler holds what was named, until dec_lock_ref
    alloc_extend          the request owns the pages behind it
    cache_unfinished_req  its full pages become cached, and its lock covers them; a page that is cached already is freed
                          and the request's row names the cached one instead
    cache_finished_req    the same, then the lock ends and the page that is not full is freed

With recurrent layers a hit ends where a state is kept (`StateCheckpoints`): of requests that ended, and with an extra
buffer of those that passed a boundary of `recurrent_track_interval` tokens.

Hits, sizes and evictions count whole pages. The tree evicts whole leaves, here pages go one by one, so that a hit may
be longer. KV events are emitted as pages become hits and cease to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

import numpy as np

from kvjax.adapters.sglang_jax.cached_prefix import CachedPrefix, CachedTokens, FullPages, RankPages, WindowedPages
from kvjax.adapters.sglang_jax.hash_chains import HashChains, extra_keys_of
from kvjax.adapters.sglang_jax.metadata import SGLANG_JAX
from kvjax.adapters.sglang_jax.slot_allocator import SlotAllocator
from kvjax.adapters.sglang_jax.state_checkpoints import StateCheckpoints
from kvjax.adapters.sglang_jax.window_allocator import WindowSlotAllocator
from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.watch.kv_events import KVCacheEvent
from kvjax.errors import BlockStateError, UnknownStackError

REQUEST_ATTRIBUTES = (
    "cache_protected_len",
    "dp_rank",
    "extra_key",
    "fill_ids",
    "last_matched_prefix_len",
    "last_node",
    "origin_input_ids",
    "output_ids",
    "pop_committed_kv_cache",
    "prefix_indices",
    "req_pool_idx",
    "swa_evicted_seqlen",
    "swa_uuid_for_lock",
)


@final
class PrefixCache:
    """The surface of `BasePrefixCache`; with a window that of `SWARadixCache` too, but for its walks of the tree.

    With the `eviction_policy` "probation" states at which no request ended go first; of window pages their allocator
    says it.

    Not thread-safe. A match costs about 1 us a page to hash, once for a prompt that waits (`HashChains`), and 0.1 us a
    page to look up; a lock 10 ns a page.

    Raises, when made:
        MissingStackError: sglang-jax cannot be imported.
        UnknownStackError: its parameters and results are none of the recorded versions'.
        NotImplementedError: EAGLE's keys of token pairs are asked for.
        ValueError: page sizes differ, or a window has no allocator of windows.
    """

    eviction_policy: ClassVar[str] = "lru"

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: SlotAllocator | WindowSlotAllocator,
        page_size: int = 1,
        disable: bool = False,
        *,
        sliding_window_size: int | None = None,
        enable_kv_cache_events: bool = False,
        is_eagle: bool = False,
        is_hybrid_recurrent: bool = False,
        enable_recurrent_extra_buffer: bool = False,
        recurrent_track_interval: int | None = None,
        hasher: BlockHasher | None = None,  # None: XXH3 of a page's tokens in CBOR
    ) -> None:
        for name in ("BasePrefixCache", "MatchPrefixParams", "EvictParams", "DecLockRefParams", "RadixKey"):
            SGLANG_JAX.load(name)
        self._match_result = SGLANG_JAX.load("MatchResult")
        self._evict_result = SGLANG_JAX.load("EvictResult")
        self._lock_result = SGLANG_JAX.load("IncLockRefResult")
        if is_eagle:
            raise NotImplementedError("expected keys of single tokens, got is_eagle: kvjax hashes no pairs of tokens")
        if page_size != token_to_kv_pool_allocator.page_size:
            raise ValueError(f"expected page_size {token_to_kv_pool_allocator.page_size}, got {page_size}")
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size, self.disable = page_size, disable
        self.sliding_window_size = sliding_window_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.root_node = CachedPrefix()
        self._chains = HashChains(BlockHasher(page_size, "xxhash_cbor") if hasher is None else hasher)
        self._ranks = _rank_pages(token_to_kv_pool_allocator, sliding_window_size)
        self._known_requests: set[type] = set()
        self.enable_recurrent_extra_buffer = enable_recurrent_extra_buffer
        self.recurrent_track_interval = recurrent_track_interval
        if is_hybrid_recurrent and page_size != 1 and not enable_recurrent_extra_buffer:
            raise ValueError(f"expected pages of 1 token or enable_recurrent_extra_buffer, got pages of {page_size}")
        if is_hybrid_recurrent and sliding_window_size is not None:
            raise NotImplementedError("expected full attention beside recurrent layers, got sliding windows")
        ranks = range(len(self._ranks)) if is_hybrid_recurrent else ()
        has_probation = self.eviction_policy == "probation"
        self._states = [StateCheckpoints(req_to_token_pool, rank, has_probation=has_probation) for rank in ranks]
        for rank in self._ranks:
            for pool in rank.pools():
                pool.enable_kv_cache_events = enable_kv_cache_events

    # -- matching and locking -----------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """The slots and the name of the longest cached prefix of `params.key`, in whole pages."""
        key = params.key
        found = self.root_node
        if not self.disable and len(key) >= self.page_size:
            rank = _rank_of(key)
            found = self._ranks[rank].find(self._chains.of(key.token_ids, key.extra_key))
            if self._states and not params.full_only:
                found = self._with_state(found, params)
            if not len(found.pages) and not found.num_shared:
                found = self.root_node
        return self._match_result(
            device_indices=self.token_to_kv_pool_allocator.slots_of(found.pages),
            last_device_node=found,
            last_host_node=found,
            best_match_node=found,
            host_hit_length=0,
        )

    def _with_state(self, found: CachedPrefix, params: Any) -> CachedPrefix:
        """The longest part of it that has a recurrent state, which `params.req` is told to begin with."""
        states = self._states[found.dp_rank]
        count = states.longest(found.hashes)
        if not count:
            return self.root_node
        last = found.hashes[count - 1]
        if params.cow_recurrent and params.req is not None:
            params.req.recurrent_cow_src_index = states.slot_of(last)
        return replace(found, hashes=found.hashes[:count], pages=found.pages[:count], state_hash=last)

    def inc_lock_ref(self, node: CachedPrefix) -> Any:
        """Holds the pages that `node` names; `delta` is what that adds to the evictable tokens.

        Raises:
            BlockStateError: some of them were evicted since the match. Nothing is changed.
        """
        before = self.evictable_size(node.dp_rank)
        if node.state_hash is not None:
            self._states[node.dp_rank].check(node.state_hash)
        self._ranks[node.dp_rank].lock(node)
        if node.state_hash is not None:
            self._states[node.dp_rank].lock(node.state_hash)
        return self._lock_result(delta=self.evictable_size(node.dp_rank) - before)

    def dec_lock_ref(self, node: CachedPrefix, params: Any = None) -> int:
        """Ends an `inc_lock_ref` of this very node, and returns what that adds to the evictable tokens."""
        before = self.evictable_size(node.dp_rank)
        self._unlock(node)
        return self.evictable_size(node.dp_rank) - before

    def _unlock(self, node: CachedPrefix) -> None:
        self._ranks[node.dp_rank].unlock(node)
        if node.state_hash is not None:
            self._states[node.dp_rank].unlock(node.state_hash)

    # -- requests -----------------------------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """Caches the full pages of the tokens `req.fill_ids`, and locks them; its row and prefix name them then."""
        self._check_request(req)
        self._cache_so_far(req)
        if len(req.fill_ids) >= len(req.origin_input_ids):
            self._keep(req.last_node or self.root_node)

    def _cache_so_far(self, req: Any) -> None:
        slots = self._slots_of(req, len(req.fill_ids))
        num_cached = self._num_cached(req, len(slots), is_finished=False)
        if self.disable or not num_cached:
            req.prefix_indices = slots
            return
        held = req.last_node
        made = self._cached(req, req.fill_ids, slots[:num_cached])
        if self._states and self.enable_recurrent_extra_buffer:
            self._take_boundary_state(req, made)
        cached = self.token_to_kv_pool_allocator.slots_of(made.pages)
        first = len(held.pages) * self.page_size
        self.req_to_token_pool.write((req.req_pool_idx, slice(first, len(cached))), cached[first:])
        req.prefix_indices = np.concatenate([cached, slots[len(cached) :]])
        req.last_node = made
        req.swa_uuid_for_lock = None
        req.last_matched_prefix_len = req.cache_protected_len = len(cached)

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        """Caches the full pages of the committed tokens, or with `is_insert=False` frees them; ends the lock.

        A second call for the same request does nothing.
        """
        self._check_request(req)
        length = req.pop_committed_kv_cache()
        slots = self._slots_of(req, length)
        rank = _rank_of(req)
        free = self.token_to_kv_pool_allocator.free
        if self.disable:
            free(slots, rank)
            return
        held, req.last_node = req.last_node or self.root_node, self.root_node
        if is_insert and length:
            tokens = (list(req.origin_input_ids) + list(req.output_ids))[:length]
            made = self._cached(req, tokens, slots[: self._num_cached(req, length, is_finished=True)], held)
            if self._states:
                self._take_last_state(req, made)
            self._keep(made)
            free(slots[len(made.pages) * self.page_size :], rank)
            held = made
        else:
            free(slots[len(held.pages) * self.page_size :], rank)
        if self._states and self.enable_recurrent_extra_buffer:
            self.req_to_token_pool.free_recurrent_cache(req)
        self._unlock(held)

    def _keep(self, prefix: CachedPrefix) -> None:
        """A prompt or an answer ends there."""
        self._ranks[prefix.dp_rank].keep(prefix)
        if self._states and prefix.hashes:
            self._states[prefix.dp_rank].keep(prefix.hashes[-1])

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
        """Frees the request's own window pages that no token from `pre_len` on sees, and one page more is kept."""
        assert self.sliding_window_size is not None
        self._check_request(req)
        held = len(req.last_node.pages) * self.page_size
        start = max(req.swa_evicted_seqlen, held)
        end = (pre_len - self.sliding_window_size - self.page_size) // self.page_size * self.page_size
        req.swa_evicted_seqlen = max(start, end)
        if end > start:
            slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
            self.token_to_kv_pool_allocator.free_swa(slots, dp_rank)  # type: ignore[union-attr]

    def _cached(
        self, req: Any, token_ids: Sequence[int], slots: np.ndarray, held: CachedPrefix | None = None
    ) -> CachedPrefix:
        """The prefix of all full pages of `slots`, cached and locked instead of what the request held."""
        held = (req.last_node or self.root_node) if held is None else held
        num_pages = len(slots) // self.page_size
        own = slots[len(held.pages) * self.page_size : num_pages * self.page_size : self.page_size] // self.page_size
        if not own.size:
            return held
        if held.state_hash is not None:
            self._states[held.dp_rank].unlock(held.state_hash)
        asked = req.origin_input_ids[:-1]  # by the match before
        hashes = self._chains.extend(held.hashes, token_ids[: num_pages * self.page_size], req.extra_key, asked)
        tokens = CachedTokens(np.asarray(token_ids), extra_keys_of(req.extra_key))
        return self._ranks[_rank_of(req)].extend(held, own, hashes, tokens)

    def _num_cached(self, req: Any, length: int, *, is_finished: bool) -> int:
        """Tokens of a request that may be cached: with an extra buffer, up to the boundary that has a state."""
        if not (self._states and self.enable_recurrent_extra_buffer):
            return length
        return min(length, req.recurrent_last_track_seqlen or 0)

    def _take_boundary_state(self, req: Any, made: CachedPrefix) -> None:
        """Takes the slot of the boundary's state from a request that goes on, for a free one; without one, later."""
        rank, rows = _rank_of(req), self.req_to_token_pool
        if len(made.pages) * self.page_size != req.recurrent_last_track_seqlen:
            return
        replacement = self._states[rank].replacement()
        if replacement is None:
            return
        (slot,) = rows.donate_recurrent_ping_pong_slot(req, replacement).tolist()
        req.recurrent_last_track_seqlen = None
        if not self._states[rank].put(made.hashes[-1], slot):
            rows.free_recurrent_slot(slot, rank)

    def _take_last_state(self, req: Any, made: CachedPrefix) -> None:
        """Takes the slot of the last state from a request that ends, unless its prefix has one."""
        rows, states = self.req_to_token_pool, self._states[_rank_of(req)]
        if not self.enable_recurrent_extra_buffer:
            if (
                req.recurrent_pool_idx is not None
                and len(made.pages)
                and states.put(made.hashes[-1], req.recurrent_pool_idx)
            ):
                rows.commit_to_tree(req)
        elif req.recurrent_last_track_seqlen and len(made.pages) * self.page_size == req.recurrent_last_track_seqlen:
            keep = rows.get_recurrent_ping_pong_keep_idx(req)
            if states.put(made.hashes[-1], req.recurrent_ping_pong_track_buffer[keep]):
                rows.set_recurrent_ping_pong_slot(req, keep, 0)

    def _slots_of(self, req: Any, length: int) -> np.ndarray:  # int32[length], a copy
        return self.req_to_token_pool.read(req.req_pool_idx, length) if length else np.zeros(0, np.int32)

    def _check_request(self, req: Any) -> None:
        """Refuses a request class that lacks what is read of it; each class is looked at once."""
        if type(req) in self._known_requests:
            return
        for name in REQUEST_ATTRIBUTES:
            if not hasattr(req, name):
                raise UnknownStackError(f"expected sglang-jax's Req of {SGLANG_JAX.versions}, it lacks {name!r}")
        self._known_requests.add(type(req))

    # -- evicting -----------------------------------------------------------------------------------------------------

    def evict(self, params: Any) -> Any:
        """Frees cached pages without a lock, least recently used first, until enough tokens are free.

        `params.dp_rank` None: of all ranks, the first first.
        """
        wanted = [-(-params.num_tokens // self.page_size), -(-params.swa_num_tokens // self.page_size)]
        evicted = np.zeros(2, np.int64)
        if not self.disable:
            for rank in self._ranks if params.dp_rank is None else (self._ranks[params.dp_rank],):
                evicted += rank.evict(*(np.array(wanted) - evicted).tolist())
        full, windows = (evicted * self.page_size).tolist()
        num_states = 0
        for rank, states in enumerate(self._states):
            if params.dp_rank in (None, rank):
                num_states += states.keep_cached(self._ranks[rank].pools()[0])
                num_states += states.evict(params.recurrent_num - num_states)
        return self._evict_result(
            num_tokens_evicted=full, swa_num_tokens_evicted=windows, recurrent_num_evicted=num_states
        )

    def reset(self) -> None:
        """Forgets every cached prefix.

        Raises:
            BlockStateError: a request holds pages. Nothing is changed.
        """
        pools = [pool for rank in self._ranks for pool in rank.pools()]
        num_held = sum(int(np.count_nonzero(pool.ref_count)) for pool in pools)
        if num_held:
            raise BlockStateError(f"expected no page held, got {num_held}; let requests finish, or retract them")
        self.token_to_kv_pool_allocator.clear()
        for states in self._states:
            states.clear()

    # -- sizes --------------------------------------------------------------------------------------------------------

    def evictable_size(self, dp_rank: int = 0) -> int:
        """Cached tokens without a lock; of two pools the smaller number."""
        return min(self._sizes(dp_rank, 0))

    def protected_size(self, dp_rank: int = 0) -> int:
        """Cached tokens under a lock, of full attention."""
        return self.full_protected_size(dp_rank)

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Cached tokens without a lock, of full attention."""
        return self._sizes(dp_rank, 0)[0]

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Cached tokens under a lock, of full attention."""
        return self._sizes(dp_rank, 1)[0]

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Cached tokens without a lock, of windows."""
        return sum(self._sizes(dp_rank, 0)[1:])

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Cached tokens under a lock, of windows."""
        return sum(self._sizes(dp_rank, 1)[1:])

    def total_size(self) -> Any:
        """Cached tokens of all ranks; a pair with the windows' where there are some."""
        totals = [0] * len(self._ranks[0].pools())
        for rank in self._ranks:
            for place, pool in enumerate(rank.pools()):
                totals[place] += pool.num_hashed_blocks * self.page_size
        return totals[0] if len(totals) == 1 else tuple(totals)

    def _sizes(self, dp_rank: int, held: int) -> list[int]:
        """Per pool the rank's cached tokens, without a lock (0) or under one (1)."""
        free = [(pool.num_cached_free_blocks, pool.num_hashed_blocks) for pool in self._ranks[dp_rank].pools()]
        return [(hashed - cached if held else cached) * self.page_size for cached, hashed in free]

    # -- what else the scheduler asks ---------------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        """Whether there are windows."""
        return self.sliding_window_size is not None

    def supports_recurrent(self) -> bool:
        """Whether recurrent states are cached."""
        return bool(self._states)

    def recurrent_extra_buffer_active(self) -> bool:
        """Whether requests keep the state of the last boundary."""
        return bool(self._states) and self.enable_recurrent_extra_buffer and self.recurrent_track_interval is not None

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """Kept states without a lock."""
        return self._states[dp_rank].num_evictable if self._states else 0

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """Kept states under a lock."""
        return self._states[dp_rank].num_protected if self._states else 0

    def take_events(self) -> list[KVCacheEvent]:
        """The KV events of all ranks since the last call, rank by rank; `take_rank_events` tells them apart."""
        return [event for rank in range(len(self._ranks)) for event in self.take_rank_events(rank)]

    def take_rank_events(self, dp_rank: int) -> list[KVCacheEvent]:
        """The KV events of one rank since the last call, oldest first."""
        return self.token_to_kv_pool_allocator.event_logs[dp_rank].take()

    def sanity_check(self) -> None:
        """Raises InvariantError if a pool is not sound. O(pages)."""
        for rank in self._ranks:
            for pool in rank.pools():
                pool.check_invariants()

    def pretty_print(self) -> None:
        """Prints a line a rank."""
        for rank, pages in enumerate(self._ranks):
            print(f"rank {rank}: " + ", ".join(f"{pool.num_hashed_blocks} cached pages" for pool in pages.pools()))

    def init_load_back(self, last_host_node: Any, host_hit_length: int) -> Any:
        """Refused: there is no host tier."""
        raise NotImplementedError("expected hicache_storage disable, got a load from the host")

    def ready_to_load_host_cache(self) -> Any:
        """Refused: there is no host tier."""
        self.init_load_back(None, 0)

    def check_hicache_events(self) -> Any:
        """Refused: there is no host tier."""
        self.init_load_back(None, 0)


def _rank_of(key: Any) -> int:
    """The data-parallel rank of a key or a request; None is 0."""
    return 0 if key.dp_rank is None else key.dp_rank


def _rank_pages(allocator: SlotAllocator | WindowSlotAllocator, sliding_window: int | None) -> Sequence[RankPages]:
    if isinstance(allocator, WindowSlotAllocator):
        if sliding_window is None or not 0 < sliding_window < math.inf:
            raise ValueError(f"expected sliding_window_size >= 1 for two pools, got {sliding_window}")
        return [WindowedPages(allocator, rank, sliding_window) for rank in range(allocator.dp_size)]
    if sliding_window is not None:
        raise ValueError("expected a WindowSlotAllocator for sliding_window_size, got one of full attention")
    return [FullPages(allocator, rank) for rank in range(allocator.dp_size)]
