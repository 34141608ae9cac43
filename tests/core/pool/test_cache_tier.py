"""What a pool's link to a tier remembers of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import TierLink
from kvjax.transfer.no_tier import NoTier


def test_the_last_use_of_a_block_is_when_it_was_registered_hit_or_freed() -> None:
    link = TierLink(NoTier(), 0, 9)
    pool = BlockPool(9, tier_link=link)
    ids = pool.get_new_blocks(8)
    for clock, call in enumerate(
        (
            lambda: pool.register_many(ids, [BlockHash(bytes([i]) * 32) for i in range(8)], 0),
            lambda: pool.free_blocks(ids),
            lambda: pool.touch(ids[:5]),
            lambda: pool.touch(ids[:2]),
            lambda: pool.free_blocks(ids[:5]),  # the first two are held still
        ),
        1,
    ):
        link.clock = clock
        call()
    assert link.last_used[ids].tolist() == [4, 4, 5, 5, 5, 2, 2, 2]


@pytest.mark.parametrize("free", ["free_blocks", "free_held"])
def test_however_blocks_are_freed_it_is_their_last_use(free: str) -> None:
    link = TierLink(NoTier(), 0, 9)
    pool = BlockPool(9, tier_link=link)
    ids = pool.get_new_blocks(8).astype(np.int64)
    pool.touch(ids[:2])
    link.clock = 3
    getattr(pool, free)(ids[:5])
    assert link.last_used[ids].tolist() == [0, 0, 3, 3, 3, 0, 0, 0]
    link.clock = 4
    pool.free_blocks([ids.item(0)])
    assert link.last_used.item(ids.item(0)) == 4


def test_a_hit_ends_probation_and_so_do_other_contents() -> None:
    link = TierLink(NoTier(), 0, 5)
    pool = BlockPool(5, tier_link=link)
    ids = pool.get_new_blocks(4)
    pool.register_many(ids, [BlockHash(bytes([i]) * 32) for i in range(4)], 0)
    link.on_probation[ids] = True
    pool.free_blocks(ids)
    pool.touch(ids[:1])
    assert link.on_probation[ids].tolist() == [False, True, True, True]
    reused = pool.get_new_blocks(1)
    assert link.on_probation[reused].all(), "its tier asks when it hears of the reuse"
    pool.register_many(reused, [BlockHash(bytes(32))], 0)
    assert np.count_nonzero(link.on_probation[ids]) == 2
