"""A tier in a dict, and pages that are whatever was last written to them: what a request reads must be its own KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.core import BlockHash, BlockHasher, ElsewhereHit, KVCacheManager, Request
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASHER = BlockHasher(2, seed="tier")
Content = tuple[int, tuple[int, ...]]  # group, all tokens up to the end of the page


class ToyTier:
    """Keeps the pages of the `most` blocks that were reused last."""

    def __init__(self, most: int = 1_000) -> None:
        self.pages: dict[tuple[int, int], Content] = {}  # of the device, by pool and block
        self.kept: dict[tuple[BlockHash, int], Content] = {}
        self.most = most

    def before_reuse(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_ids: np.ndarray
    ) -> None:
        for block_id, block_hash, group_id in zip(block_ids.tolist(), block_hashes, group_ids.tolist(), strict=True):
            self.kept.pop((block_hash, group_id), None)
            self.kept[block_hash, group_id] = self.pages[pool_id, block_id]

    def trim(self) -> None:
        """Forgets what came first. Between steps only: a lookup's answer is good until its blocks are loaded."""
        while len(self.kept) > self.most:
            del self.kept[next(iter(self.kept))]

    def after_register(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_id: int
    ) -> None: ...

    def holds(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:
        return np.array([(block_hash, group_id) in self.kept for block_hash in block_hashes], bool)


class TieredWorld:
    """A manager with a toy tier, and what its device would hold. Each admission is a step."""

    def __init__(self, groups: Sequence[NaiveGroup], num_blocks: int, seed: int, most: int = 1_000, **options: Any):
        self.groups, self.rng = groups, np.random.default_rng(seed)
        self.tier = ToyTier(most)
        num_pools = 1 + max(group.pool for group in groups)
        config = config_of(list(groups), [num_blocks] * num_pools)
        self.manager = KVCacheManager(config, 48, 2, tier=self.tier, **options)
        self.running: list[Request] = []
        self.num_made = self.num_loaded = 0

    def request(self, max_tokens: int = 30) -> Request:
        self.num_made += 1
        tokens = self.rng.integers(0, 2, int(self.rng.integers(1, max_tokens)))
        tokens[:12] = 0  # prompts begin alike
        return Request(f"r{self.num_made}", tokens, block_hasher=HASHER)

    def step(self) -> None:
        self.manager.new_step_starts()
        self.tier.trim()
        while self.running and self.rng.random() < 0.6:
            self.manager.free(self.running.pop(int(self.rng.integers(len(self.running)))))
        request = self.request()
        hit, num_hit = self.manager.get_computed_blocks(request)
        elsewhere = hit.elsewhere if self.rng.random() < 0.9 else None
        num_external = 0 if elsewhere is None else elsewhere.num_tokens
        num_new = request.num_tokens - num_hit - num_external
        if (
            self.manager.allocate_slots(request, num_new, num_hit, hit, num_external_computed_tokens=num_external)
            is None
        ):
            return
        if elsewhere is not None:
            self.load(request, elsewhere)
        request.num_computed_tokens = request.num_tokens
        self.compute(request, num_hit + num_external)
        self.running.append(request)
        self.check(request)

    def load(self, request: Request, elsewhere: ElsewhereHit) -> None:
        """Fills the new blocks: from the pool's block while it is still that one, else from the tier."""
        contents = {}
        for group_id, (first, block_hashes, block_ids) in enumerate(elsewhere.blocks):
            pool_id, table = self.groups[group_id].pool, self.manager.get_block_ids(request.request_id)[group_id]
            for i, (block_hash, block_id) in enumerate(zip(block_hashes, block_ids.tolist(), strict=True)):
                assert table[first + i], "a block to be loaded has a page of its own"
                pool = self.manager.block_pools[pool_id]
                is_there = block_id >= 0 and pool.block_hash_of(block_id) == block_hash and block_id not in table
                source = self.tier.pages[pool_id, block_id] if is_there else self.tier.kept[block_hash, group_id]
                contents[pool_id, table[first + i]] = source
                self.num_loaded += 1
        self.tier.pages |= contents

    def compute(self, request: Request, start: int) -> None:
        for place, column, content in self.own_pages(request):
            if (column + 1) * self.groups[content[0]].block_size > start:
                self.tier.pages[place] = content

    def check(self, request: Request) -> None:
        for place, column, content in self.own_pages(request):
            assert self.tier.pages[place] == content, f"{request.request_id} reads other KV in column {column}"

    def own_pages(self, request: Request) -> list[tuple[tuple[int, int], int, Content]]:
        """(pool, block), column and right content of every page that the request holds."""
        tokens = request.token_ids.tolist()
        return [
            ((group.pool, block_id), column, (group_id, tuple(tokens[: (column + 1) * group.block_size])))
            for group_id, group in enumerate(self.groups)
            for column, block_id in enumerate(self.manager.get_block_ids(request.request_id)[group_id])
            if block_id
        ]

    # -- the oracle ---------------------------------------------------------------------------------------------------

    def reach(self, request: Request, num_hit: int, eagle: bool) -> int:
        """The longest hit that there could be, by trying every length."""
        align = int(np.lcm.reduce([group.block_size for group in self.groups]))
        for length in range(request.num_tokens - 1, num_hit, -1):
            if length % align == 0 and all(
                self.serves(request, i, length, num_hit, eagle) for i in range(len(self.groups))
            ):
                return length
        return num_hit

    def serves(self, request: Request, group_id: int, length: int, num_hit: int, eagle: bool) -> bool:
        group = self.groups[group_id]
        size = group.block_size
        first_seen = 0 if group.window is None else max(length - group.window + 1, 0)
        end = length // size + eagle
        if end * size > request.num_tokens - 1:
            return False
        hashes = self.manager.groups.hashing.of_block_size(request.block_hashes, size)
        columns = range(max(first_seen // size, num_hit // size), end)
        cached = self.manager.block_pools[group.pool].hash_maps[group_id]
        return all(hashes[c] in cached or (hashes[c], group_id) in self.tier.kept for c in columns)
