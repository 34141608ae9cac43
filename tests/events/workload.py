"""A manager under random traffic: prompts that share prefixes, chunked prefill, decoding, preemption, resets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.routing import PrefixIndex
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASH_BLOCK_SIZE = 2
MAX_MODEL_LEN = 40
HASHER = BlockHasher(HASH_BLOCK_SIZE, "sha256_cbor", seed="events")

FULL = (NaiveGroup(2),)
HYBRID = (NaiveGroup(2), NaiveGroup(2, window=5), NaiveGroup(2, window=3))
TWO_POOLS = (NaiveGroup(2), NaiveGroup(2, window=5, pool=1))
TWO_FULL = (NaiveGroup(2), NaiveGroup(2))
SIZES = (NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(2, window=3))
SETUPS = {"full": FULL, "hybrid": HYBRID, "two_pools": TWO_POOLS, "two_full": TWO_FULL, "sizes": SIZES}


def make_manager(groups: tuple[NaiveGroup, ...], num_blocks: int, **options: Any) -> KVCacheManager:
    num_pools = 1 + max(group.pool for group in groups)
    return KVCacheManager(
        config_of(list(groups), [num_blocks] * num_pools),
        MAX_MODEL_LEN,
        HASH_BLOCK_SIZE,
        **{"enable_kv_cache_events": True, "log_stats": True, **options},
    )


@dataclass
class Workload:
    """Drives one manager. `step` makes a handful of calls, as a scheduler would in one step."""

    manager: KVCacheManager
    seed: int
    salts: tuple[str | None, ...] = (None,)
    running: list[Request] = field(default_factory=list)
    num_requests: int = 0
    num_preemptions: int = 0
    num_resets: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        shared = random.Random(0)  # prompts of all workers have common beginnings
        self.prefixes = [[shared.randrange(100) for _ in range(16)] for _ in range(3)]

    def prompt(self) -> list[int]:
        """Part of a shared prefix and a tail of two kinds of tokens, so that tails meet again too."""
        prefix = self.rng.choice(self.prefixes)
        tail = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 8))]
        return prefix[: self.rng.randint(0, 16)] + tail

    def request(self, tokens: list[int]) -> Request:
        self.num_requests += 1
        salt = self.rng.choice(self.salts)
        return Request(f"{self.seed}-{self.num_requests}", tokens, block_hasher=HASHER, cache_salt=salt)

    def step(self) -> None:
        for request in list(self.running):
            self._advance(request)
        if self.rng.random() < 0.6:
            self._admit()
        if self.running and self.rng.random() < 0.3:
            self._finish(self.rng.choice(self.running))
        if self.rng.random() < 0.03:
            self._reset()

    def _admit(self) -> None:
        request = self.request(self.prompt())
        hit, num_hit_tokens = self.manager.get_computed_blocks(request)
        num_new_tokens = self.rng.randint(1, request.num_tokens - num_hit_tokens)
        if self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit) is not None:
            request.num_computed_tokens = num_hit_tokens + num_new_tokens
            self.running.append(request)

    def _advance(self, request: Request) -> None:
        if request not in self.running:
            return
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == MAX_MODEL_LEN:
                self._finish(request)
                return
            request.append_output_token_ids([self.rng.randrange(2)])
        num_new_tokens = self.rng.randint(1, request.num_tokens - request.num_computed_tokens)
        while self._allocate(request, num_new_tokens) is None:
            victim = self.running[-1]
            self._finish(victim)
            self.num_preemptions += 1
            if victim is request:
                return
        request.num_computed_tokens += num_new_tokens

    def _allocate(self, request: Request, num_new_tokens: int) -> object | None:
        if self.rng.random() < 0.5:
            return self.manager.allocate_slots(request, num_new_tokens)
        return self.manager.plan_step([request.row], num_new_tokens).num_planned or None

    def _finish(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)

    def _reset(self) -> None:
        for request in list(self.running):
            self._finish(request)
        assert self.manager.reset_prefix_cache()
        self.num_resets += 1


def index_of(manager: KVCacheManager) -> PrefixIndex:
    """A router's index of one replica with the manager's groups."""
    return PrefixIndex(1, manager.kv_cache_config, MAX_MODEL_LEN, HASH_BLOCK_SIZE)


def check_hits(index: PrefixIndex, work: Workload, num_lookups: int = 10) -> None:
    """The index gives random prompts the manager's hits."""
    for _ in range(num_lookups):
        request = work.request(work.prompt())
        assert index.match(request)[0] == work.manager.get_computed_blocks(request)[1]


def cached_blocks(manager: KVCacheManager) -> dict[int, dict[bytes, int]]:
    """The manager's own prefix index: per group the hashes of its hits, and how many blocks have each."""
    return {
        group_id: {block_hash: len(ids) for block_hash, ids in hashes.items()}
        for pool in manager.snapshot().pools
        for group_id, hashes in pool.blocks_by_hash.items()
    }
