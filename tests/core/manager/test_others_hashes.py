"""Requests that a serving stack hashes: its own list of hashes, which grows as the stack appends to it."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, Request

BLOCK = 4
HASHER = BlockHasher(BLOCK, seed="test")
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float32")


def make_manager(num_blocks: int = 40) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig.single_pool(num_blocks, SPEC), max_model_len=64, hash_block_size=BLOCK)


@pytest.mark.parametrize("seed", range(20))
def test_they_are_hit_and_registered_as_those_that_kvjax_hashes(seed: int) -> None:
    """One manager gets hashers, the other lists; both give the same blocks, call by call."""
    rng = np.random.default_rng(seed)
    own, others = make_manager(), make_manager()
    for i in range(6):
        tokens = rng.integers(0, 2, int(rng.integers(1, 20)))
        mine = Request(f"r{i}", tokens, block_hasher=HASHER)
        hashes = list(mine.block_hashes)
        theirs = Request(f"r{i}", np.zeros(tokens.size, np.int32), block_hashes=hashes)
        hit, length = own.get_computed_blocks(mine)
        hit_of_theirs, length_of_theirs = others.get_computed_blocks(theirs)
        assert (hit.get_block_ids(), length) == (hit_of_theirs.get_block_ids(), length_of_theirs)
        own.allocate_slots(mine, tokens.size - length, length, hit)
        others.allocate_slots(theirs, tokens.size - length, length, hit_of_theirs)
        mine.num_computed_tokens = theirs.num_computed_tokens = tokens.size
        for token in rng.integers(0, 2, 9).tolist():
            mine.append_output_token_ids(token)
            hashes += mine.block_hashes[len(hashes) :]
            got, got_theirs = own.allocate_slots(mine, 1), others.allocate_slots(theirs, 1)
            assert got is not None
            assert got_theirs is not None
            assert got.get_block_ids() == got_theirs.get_block_ids()
            mine.num_computed_tokens += 1
            theirs.num_computed_tokens += 1
        assert own.block_pool.snapshot() == others.block_pool.snapshot()
        others.check_invariants()
        if rng.random() < 0.5:
            own.free(mine)
            others.free(theirs)


def test_one_side_hashes_a_request() -> None:
    with pytest.raises(ValueError, match="expected block_hasher or block_hashes, got both"):
        Request("r", [1, 2], block_hasher=HASHER, block_hashes=[])


@pytest.mark.parametrize("kept", range(8))
def test_an_admission_leaves_the_blocks_that_are_kept_free(kept: int) -> None:
    """Of 7 blocks 3 are needed; who runs already takes what there is."""
    manager = make_manager(8)
    request = Request("r", np.arange(10), block_hasher=HASHER)
    fits = kept <= 4
    assert (manager.allocate_slots(request, 10, num_kept_free=kept) is not None) == fits
    if not fits:
        assert manager.block_pool.num_free_blocks == 7
        return
    request.num_computed_tokens = 10
    assert manager.allocate_slots(request, 4, num_kept_free=7) is not None


def test_a_count_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="expected num_kept_free"):
        make_manager().allocate_slots(Request("r", [1]), 1, num_kept_free=-1)
