"""Whatever a policy keeps: a lookup finds what the naive model finds that has the same blocks registered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvjax.core import Request
from kvjax.core.eviction.registry import EVICTION_POLICIES
from tests.core.manager.manager_lockstep import HYBRIDS, KINDS, SETUPS
from tests.core.manager.naive_manager import NaiveManager, NaiveRequest
from tests.core.manager.random_forks import RandomForks

HIT_NOTHING = ("cross", "mamba_none")
NAMES = [name for name in (*KINDS, *HYBRIDS, "hybrid_eagle") if name not in HIT_NOTHING]
NUM_STEPS = 12


class LookedUp(RandomForks):
    """A life in which blocks lose their hashes at any time, and prompts are looked up."""

    num_hits = 0

    def note(self) -> None:
        super().note()
        if self.some(0, 3) == 0:
            pool_id = self.some(0, self.setup.num_pools - 1)
            self.manager.evict_blocks({self.some(0, self.manager.block_pools[pool_id].num_blocks - 1)}, pool_id)
        for _ in range(4):
            self.look_up(self.trunk[: self.some(1, self.setup.max_model_len)])

    def look_up(self, tokens: list[int]) -> None:
        salt = f"input {self.some(0, 1)}" if self.manager.groups.reads_encoder else None
        request = Request("lookup", tokens, cache_salt=salt, block_hasher=self.hasher)
        naive = NaiveRequest("lookup", tokens, salt)
        hit, length = self.manager.get_computed_blocks(request)
        expected, expected_length = self.with_same_blocks(request, naive).find_hit(naive)
        assert (hit.get_block_ids(), length) == (tuple(expected), expected_length)
        self.num_hits += length > 0

    def with_same_blocks(self, request: Request, naive: NaiveRequest) -> NaiveManager:
        """The model, with what the manager has registered of a request's prefixes."""
        snapshot, hashing = self.manager.snapshot(), self.manager.groups.hashing
        model = self.setup.naive([pool.num_blocks for pool in self.manager.block_pools])
        model.fresh = [set(ids) for ids in snapshot.fresh_blocks]
        for pool, of_model in zip(snapshot.pools, model.pools, strict=True):
            for group_id, by_hash in pool.blocks_by_hash.items():
                size = self.setup.groups[group_id].block_size
                for i, block_hash in enumerate(hashing.of_block_size(request.block_hashes, size)):
                    blocks = list(by_hash.get(block_hash, ()))
                    of_model.holders[group_id, naive.key((i + 1) * size)] = blocks
        return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_lookup_finds_what_is_registered(policy: str, name: str) -> None:
    """Pages are read back too: a hit holds its own tokens, whatever was evicted, forked or rejected before."""
    num_hits = 0
    for seed, retention in enumerate((None, 0)):
        life = LookedUp(replace(SETUPS[name], retention=retention), seed, options={"eviction_policy": policy})
        for _ in range(NUM_STEPS):
            life.step()
        num_hits += life.num_hits
    assert num_hits > 0
