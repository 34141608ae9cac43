"""`can_admit` is true exactly where a request's whole sequence leaves so many blocks free, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheManager, Request
from tests.core.manager.manager_lockstep import Setup, config_of
from tests.core.manager.naive_manager import NaiveGroup

HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
HASHER = BlockHasher(2, seed="test")
TWO_POOLS = (NaiveGroup(2), NaiveGroup(4, pool=1))


def make_manager(pool_sizes: list[int]) -> KVCacheManager:
    return KVCacheManager(config_of(list(TWO_POOLS), pool_sizes), max_model_len=40, hash_block_size=2)


def admit(manager: KVCacheManager, request: Request) -> bool:
    hit, length = manager.get_computed_blocks(request)
    return manager.allocate_slots(request, request.num_tokens - length, length, hit) is not None


def free_after_admission(manager: KVCacheManager, request: Request) -> list[int] | None:
    """By doing it, on a copy: per pool the blocks free once all tokens have theirs; None: they do not fit."""
    twin = KVCacheManager.restore(manager.save_state())
    return [pool.num_free_blocks for pool in twin.block_pools] if admit(twin, request) else None


@pytest.mark.parametrize("seed", range(40))
def test_it_tells_what_an_admission_would_leave(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool_sizes = rng.integers(6, 24, 2).tolist()
    manager = make_manager(pool_sizes)
    for i in range(4):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40)))
        request, other = (Request(f"r{i}", tokens, block_hasher=HASHER) for _ in range(2))
        left = free_after_admission(manager, other)
        hit, length = manager.get_computed_blocks(request)
        before = manager.snapshot()
        for kept in [(0, 0), tuple(rng.integers(0, 12, 2).tolist()), tuple(left or (0, 0))]:
            expected = left is not None and all(a >= b for a, b in zip(left, kept, strict=True))
            assert manager.can_admit(request, length, hit, kept_free=kept) == expected
        expected = left is not None and min(left) >= 3
        assert manager.can_admit(request, length, hit, kept_free=3) == expected
        assert manager.snapshot() == before
        admit(manager, request)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kept_free": (1,)}, r"expected kept_free of 2 pools or one number, got \(1,\)"),
        ({"kept_free": (1, -1)}, "expected kept_free >= 0, got -1"),
        ({"kept_free": -1}, "expected kept_free >= 0, got -1"),
        ({"num_hit_tokens": -1}, "expected num_hit_tokens >= 0, got -1"),
        ({"num_encoder_tokens": -1}, "expected num_encoder_tokens >= 0, got -1"),
    ],
)
def test_numbers_that_can_not_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_manager([9, 9]).can_admit(Request("r", range(8)), **arguments)


@pytest.mark.parametrize("num_encoder_tokens", [1, 4, 5, 12])
def test_the_encoders_tokens_need_blocks_too(num_encoder_tokens: int) -> None:
    """Three blocks of tokens, and those of the encoder's."""
    config = KVCacheConfig.single_pool(
        8,
        FullAttentionSpec(block_size=4, **HEADS),
        CrossAttentionSpec(block_size=4, max_num_encoder_tokens=12, **HEADS),
    )
    manager = KVCacheManager(config, max_model_len=40, hash_block_size=4)
    request = Request("r", range(12))
    left = 7 - 3 - -(-num_encoder_tokens // 4)
    assert manager.can_admit(request, kept_free=left, num_encoder_tokens=num_encoder_tokens)
    assert not manager.can_admit(request, kept_free=left + 1, num_encoder_tokens=num_encoder_tokens)


def test_tokens_that_come_from_elsewhere_need_blocks_for_their_window_only() -> None:
    """18 of 20 tokens come from elsewhere and no block is hit: 2 blocks of 2 hold what a window of 3 sees."""
    manager = Setup((NaiveGroup(2, window=3),)).manager([4])
    request = Request("external", range(20), block_hasher=HASHER)
    assert manager.allocate_slots(request, 2, num_external_computed_tokens=18) is not None
