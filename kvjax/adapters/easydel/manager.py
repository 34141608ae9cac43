"""EasyDeL's CacheManager over kvjax's: the same calls, a kvjax manager for each data-parallel shard.

Flow:    EasyDeL's Scheduler -> [CacheManager] -> kvjax.core.KVCacheManager of a shard -> CachePages
Source:  EasyDeL 0.3.0, easydel/inference/esurge/core/manager.py, page_pool.py, dp_sharding.py

The pages are divided among the shards as in the stack: when the first call says into how many. A request stays in the
shard of its first pages: of its hit, else of the hint, else of the shard with the most free pages. Where the pages do
not divide evenly the hint means nothing, as in the stack.

A call of `allocate_slots` that returns None has changed nothing, so nobody has to roll back a hit's pages: the stack's
coordinator does that in `rollback_new_computed_pages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from kvjax.adapters.easydel.pages import CachePages, ShardPages
from kvjax.adapters.easydel.specs import translate_groups
from kvjax.adapters.policy import STACK, with_policy
from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.options.release_rules import ReleaseRules
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.errors import UnknownStackError

# What EasyDeL caches and evicts: everything, and what was freed first.
OPTIONS = ManagerOptions(eviction_policy="lru", retention_interval=None, rules=ReleaseRules(free_order="append"))
REQUEST_ATTRIBUTES = ("all_token_ids", "num_computed_tokens", "num_tokens", "request_id", "sampling_params")


@dataclass(frozen=True)
class _Shard:
    """One shard's manager, its page ids and the requests that hold some."""

    ids: ShardPages
    core: KVCacheManager
    running: dict[str, Request] = field(default_factory=dict)


@final
class CacheManager:
    """What EasyDeL's scheduler calls. Used from one thread; costs are those of `kvjax.core.KVCacheManager`.

    `policy` says whose rules decide what is kept and evicted (`kvjax.adapters.policy`); `install` sets it.

    Raises, when made: as `translate_groups`.
    """

    policy: ClassVar[str] = STACK

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[Any],
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
    ) -> None:
        translate_groups(kv_cache_groups, num_pages)
        self.num_pages, self.max_model_len = num_pages, max_model_len
        self.kv_cache_groups, self.num_kv_cache_groups = kv_cache_groups, len(kv_cache_groups)
        self.enable_caching, self.use_eagle = enable_caching, use_eagle
        self.page_size = kv_cache_groups[0].kv_cache_spec.page_size if enable_caching else None
        self._hasher = BlockHasher(math.gcd(*(group.kv_cache_spec.page_size for group in kv_cache_groups)))
        self._shards = self._make_shards(1)
        self._is_divided = False  # whether a call has said into how many shards
        self._looked_up: dict[str, Request] = {}  # of requests that wait
        self._num_shared: dict[str, int] = {}  # of them: `KVCacheBlocks.num_shared_tokens`, where there are any
        self._known_class: type | None = None  # of the request that was checked last
        self.page_pool = PagePool(self)

    @property
    def usage(self) -> float:
        """Held share of the pages, 0 to 1."""
        return self.page_pool.get_usage()

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """kvjax's, one a shard."""
        return tuple(shard.core for shard in self._shards)

    def get_computed_pages(
        self, request: Any, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> tuple[CachePages, int]:
        """The pages of the longest cached prefix, and its tokens: at least one token is left to compute.

        Of the hinted shard; without a hint, of the shard that has the longest.

        Raises:
            UnknownStackError: the request lacks an attribute.
            ValueError: the pages were divided into another number of shards.
        """
        made = self._made(request)
        self._divide(data_parallel_size)
        wants_logprobs = request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
        if not self.enable_caching or wants_logprobs:
            return self.create_empty_page_list(), 0
        asked = self._shards if dp_shard_hint is None else [self._shards[dp_shard_hint % len(self._shards)]]
        hits = [(shard, *shard.core.get_computed_blocks(made)) for shard in asked]
        shard, blocks, num_tokens = max(hits, key=lambda hit: hit[2])
        self._num_shared.pop(request.request_id, None)
        if blocks.num_shared_tokens:
            self._num_shared[request.request_id] = blocks.num_shared_tokens
        return shard.ids.pages(blocks), num_tokens

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: CachePages | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_pages: bool = False,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> CachePages | None:
        """New pages for a request's next tokens; None: the shard has too few, and nothing is changed.

        Raises:
            UnknownStackError: the request lacks an attribute.
            ValueError: no new tokens, a hit that is not of this manager or not cached any more, or another division.
        """
        made = self._made(request)
        self._divide(data_parallel_size)
        shard = self._shard_of(request.request_id)
        computed = request.num_computed_tokens
        if shard is not None:
            self._sync(shard, request)
            shard.core.new_step_starts()  # nobody tells of steps; one request after another is planned
            blocks = shard.core.allocate_slots(
                shard.running[request.request_id],
                min(num_new_tokens, self.max_model_len - computed),
                num_lookahead_tokens=num_lookahead_tokens,
                delay_cache_blocks=delay_cache_pages,
            )
            return None if blocks is None else shard.ids.pages(blocks)
        shard = self._first_shard(new_computed_pages, dp_shard_hint)
        blocks = shard.core.allocate_slots(
            made,
            min(num_new_tokens, self.max_model_len - computed - num_new_computed_tokens),
            num_new_computed_tokens,
            self._as_hit(shard, new_computed_pages, self._num_shared.get(request.request_id, 0)),
            num_lookahead_tokens,
            computed,
            delay_cache_pages,
        )
        if blocks is None:
            return None
        shard.running[request.request_id] = made
        self._num_shared.pop(request.request_id, None)
        return shard.ids.pages(blocks)

    def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
        """Makes the full pages of the first tokens hits, after `delay_cache_pages`."""
        shard = self._shard_of(request.request_id)
        if shard is not None and self.enable_caching:
            self._sync(shard, request)
            shard.core.cache_blocks(shard.running[request.request_id], num_computed_tokens)

    def free(self, request: Any) -> None:
        """Frees all pages of a request, its last first; one that holds none changes nothing."""
        shard = self._shard_of(request.request_id)
        if shard is not None:
            shard.core.free(shard.running.pop(request.request_id))
        self.free_page_hashes(request)

    def free_page_hashes(self, request: Any) -> None:
        """Forgets the hashes of a request's tokens."""
        self._looked_up.pop(request.request_id, None)
        self._num_shared.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes; False, and no change, while a page is held."""
        if self.page_pool.get_num_free_pages() != self.page_pool.num_usable_pages:
            return False
        return all(shard.core.reset_prefix_cache() for shard in self._shards)

    def get_num_common_prefix_pages(self, request: Any, num_scheduled_requests: int) -> list[int]:
        """Per group the leading pages that so many requests hold; of windows and chunks 0."""
        shard = self._shard_of(request.request_id)
        if shard is None or len(shard.running) < num_scheduled_requests:
            return [0] * self.num_kv_cache_groups
        counts = []
        blocks = shard.core.get_blocks(request.request_id).blocks
        for group, spec in zip(blocks, shard.core.kv_cache_config.kv_cache_groups, strict=True):
            is_shared = [block.ref_cnt == num_scheduled_requests for block in group]
            leading = is_shared.index(False) if False in is_shared else len(is_shared)
            counts.append(leading if spec.kv_cache_spec.kind == "full_attention" else 0)
        return counts

    def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Per group the ids of a request's pages; none of an unknown one."""
        shard = self._shard_of(request_id)
        if shard is None:
            return self.create_empty_page_list().get_page_ids()
        return shard.ids.pages(shard.core.get_blocks(request_id)).get_page_ids()

    def create_empty_page_list(self) -> CachePages:
        """No pages of every group."""
        return CachePages(tuple([] for _ in range(self.num_kv_cache_groups)))

    # -- shards -------------------------------------------------------------------------------------------------------

    def _make_shards(self, count: int) -> list[_Shard]:
        made = []
        for number in range(count):
            ids = ShardPages(number, self.num_pages // count)
            core = KVCacheManager(
                translate_groups(self.kv_cache_groups, ids.num_blocks),
                self.max_model_len,
                self._hasher.block_size,
                with_policy(self.policy, OPTIONS),
                enable_caching=self.enable_caching,
                use_eagle=self.use_eagle,
            )
            made.append(_Shard(ids, core))
        return made

    def _divide(self, data_parallel_size: int | None) -> None:
        """Divides the pages at the first call, and checks the others."""
        count = data_parallel_size or 1
        if count > 1 and self.num_pages % count:
            count = 1
        if not self._is_divided and count != len(self._shards):
            self._shards = self._make_shards(count)
        self._is_divided = True
        if count != len(self._shards):
            raise ValueError(f"expected data_parallel_size {len(self._shards)} as before, got {data_parallel_size}")

    def _shard_of(self, request_id: str) -> _Shard | None:
        """The shard that a request runs in."""
        return next((shard for shard in self._shards if request_id in shard.running), None)

    def _first_shard(self, hit: CachePages | None, hint: int | None) -> _Shard:
        found = [] if hit is None else [page for ids in hit.get_page_ids() for page in ids if page]
        if found:
            return next(shard for shard in self._shards if shard.ids.has(found[0]))
        if hint is not None:
            return self._shards[hint % len(self._shards)]
        return max(self._shards, key=lambda shard: shard.core.block_pool.get_num_free_blocks())

    def _as_hit(self, shard: _Shard, pages: CachePages | None, num_shared: int) -> KVCacheBlocks | None:
        """The hit as the core's value, of a request that shares so many tokens with what some groups have cached."""
        if not num_shared and (pages is None or not any(pages.pages)):
            return None
        found = self.create_empty_page_list() if pages is None else pages
        hit = shard.core.create_kv_cache_blocks(shard.ids.block_ids(found.get_page_ids()))
        return KVCacheBlocks(hit.block_ids, hit.pools, num_shared)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _made(self, request: Any) -> Request:
        """kvjax's request for one of EasyDeL's: hashed once while it waits."""
        if type(request) is not self._known_class:
            for name in REQUEST_ATTRIBUTES:
                if not hasattr(request, name):
                    raise UnknownStackError(f"expected EngineRequest of easydel 0.3.0, it lacks {name!r}")
            self._known_class = type(request)
        shard = self._shard_of(request.request_id)
        if shard is not None:
            return shard.running[request.request_id]
        made = self._looked_up.get(request.request_id)
        if made is None or made.num_tokens != request.num_tokens:
            tokens = np.asarray(request.all_token_ids, np.int32)
            hasher = self._hasher if self.enable_caching else None
            made = Request(request.request_id, tokens, block_hasher=hasher, cache_salt=_namespace(request))
            self._looked_up[request.request_id] = made
        return made

    def _sync(self, shard: _Shard, request: Any) -> None:
        """Copies into a running request's row what EasyDeL's has counted and sampled since."""
        known, table = shard.running[request.request_id], shard.core.request_table
        table.num_computed_tokens[known.row] = request.num_computed_tokens
        if known.num_tokens < request.num_tokens:
            table.append_run(known.row, request.all_token_ids[known.num_tokens :])


@final
class PagePool:
    """What EasyDeL's scheduler reads of its pool of pages."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self.num_pages, self.enable_caching = manager.num_pages, manager.enable_caching

    @property
    def num_usable_pages(self) -> int:
        """All but the null page."""
        return self.num_pages - 1

    @property
    def cached_page_hash_to_page(self) -> range:
        """As long as there are cached pages."""
        return range(sum(core.block_pool.num_hashed_blocks for core in self._manager.managers))

    def get_num_free_pages(self) -> int:
        """Pages that nobody holds, of all shards."""
        return sum(core.block_pool.get_num_free_blocks() for core in self._manager.managers)

    def get_usage(self) -> float:
        """Held share of the pages, 0 to 1."""
        return 1.0 - self.get_num_free_pages() / self.num_usable_pages

    def reset_prefix_cache(self) -> bool:
        """`CacheManager.reset_prefix_cache`."""
        return self._manager.reset_prefix_cache()


def _namespace(request: Any) -> str | None:
    """What tells requests with equal tokens and different images apart: EasyDeL hashes it into every page."""
    items = getattr(request, "mm_features", None)
    if not (getattr(request, "has_vision", False) and items):
        return None
    return repr([(str(getattr(item, "modality", "mm")), str(getattr(item, "mm_hash", ""))) for item in items])
