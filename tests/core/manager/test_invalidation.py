"""Invalidation by origin, weight versions and requests that do not insert, against the naive model."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.core import BlockHasher, BlockOrigin, KVCacheManager, LoRARequest, Request
from tests.core.manager.manager_lockstep import FULL, SETUPS, Setup
from tests.core.manager.random_lockstep import RandomLockstep

LORA = LoRARequest("adapter", "/1")
OTHER_PATH = LoRARequest("adapter", "/2")
HASHER = BlockHasher(2, "xxhash_cbor", seed="0")


def request(name: str, num_tokens: int = 9, **options: Any) -> Request:
    return Request(name, list(range(num_tokens)), block_hasher=HASHER, **options)


def compute(manager: KVCacheManager, new: Request) -> int:
    """Admits the request and computes all its tokens; the tokens that it hit."""
    blocks, hit = manager.get_computed_blocks(new)
    assert manager.allocate_slots(new, new.num_tokens - hit, hit, blocks) is not None
    new.num_computed_tokens = new.num_tokens
    return hit


def hit(manager: KVCacheManager, **options: Any) -> int:
    return manager.get_computed_blocks(request("probe", **options))[1]


class RandomInvalidation(RandomLockstep):
    """Beside the usual calls: invalidation by each key and by predicate, and requests that stop registering."""

    def __init__(self, setup: Setup, seed: Any, **options: Any) -> None:
        super().__init__(setup, seed, track_origins=True, **options)
        self.actions += [self.invalidate] * 2 + [self.stop]

    def request_options(self) -> dict[str, Any]:
        return {
            "salt": self.one_of([None, "a", "b"]),
            "lora": self.one_of([None, None, LORA, OTHER_PATH]),
            "weight_version": self.one_of([None, 1, "1"]),
            "skip_writing_prefix_cache": self.some(0, 4) == 0,
        }

    def invalidate(self) -> None:
        condition, holds = self.one_of(
            [
                ({"cache_salt": "a"}, lambda salt, lora, version: salt == "a"),
                ({"lora": "adapter"}, lambda salt, lora, version: lora is not None),
                ({"lora": LORA}, lambda salt, lora, version: lora == LORA),
                ({"weight_version": 1}, lambda salt, lora, version: version == 1),
                ({"cache_salt": "b", "weight_version": "1"}, lambda salt, lora, version: (salt, version) == ("b", "1")),
                ({"predicate": lambda origin: origin.cache_salt is None}, lambda salt, lora, version: salt is None),
            ]
        )
        naive = self.both.naive
        dropped = 0
        for pool in naive.pools:
            for block, (_, (salt, origin, _)) in sorted(pool.key_of.items(), key=lambda item: item[0]):
                if holds(salt, *origin):
                    pool.forget(block)
                    dropped += 1
        for pair in self.both.pairs.values():
            if holds(pair.naive.salt, *pair.naive.origin):
                naive.stopped.add(pair.name)
        assert self.both.manager.invalidate(**condition) == dropped

    def stop(self) -> None:
        self.both.naive.stopped |= self.both.pairs.keys()
        assert self.both.manager.stop_registering() == len(self.both.pairs)

    def check_origins(self) -> None:
        """What the pools remember is what the cached blocks' keys say."""
        for pool, naive in zip(self.both.manager.snapshot().pools, self.both.naive.pools, strict=True):
            expected = {block: BlockOrigin(salt, *origin) for block, (_, (salt, origin, _)) in naive.key_of.items()}
            assert pool.origins == expected


@pytest.mark.parametrize("name", SETUPS)
def test_agrees_with_the_naive_model(name: str) -> None:
    for seed in range(2):
        calls = RandomInvalidation(SETUPS[name], [seed, *name.encode()])
        for _ in range(120):
            calls.call()
            calls.check_origins()


def test_weight_versions_share_nothing_and_a_waiting_request_changes_its_own() -> None:
    manager = FULL.manager([30])
    compute(manager, request("old", weight_version=1))
    assert [hit(manager, weight_version=version) for version in (1, 2, "1", None)] == [8, 0, 0, 0]
    waiting = request("waiting", weight_version=1)
    hashes = waiting.block_hashes
    waiting.set_weight_version(2)
    assert waiting.block_hashes is hashes
    assert hashes == request("fresh", weight_version=2).block_hashes
    assert compute(manager, waiting) == 0
    assert hit(manager, weight_version=2) == 8
    plain = request("plain", weight_version=3)
    plain.set_weight_version(None)
    assert plain.block_hashes == request("never had one").block_hashes
    assert not plain.has_extra_keys


def test_origins_are_forgotten_with_their_blocks() -> None:
    manager = FULL.manager([10], track_origins=True)
    for i in range(5_000):
        user = request(f"r{i}", 2, cache_salt=f"user {i}")
        compute(manager, user)
        manager.free(user)
    origins = manager.block_pool.origins
    assert origins is not None
    assert len(origins._numbers) <= 1_024
    assert origins.distinct() == [BlockOrigin(f"user {i}") for i in range(4_991, 5_000)]
    assert manager.invalidate(cache_salt="user 4998") == 1


def test_bad_calls_are_refused_and_change_nothing() -> None:
    manager = FULL.manager([30])
    running = request("running", cache_salt="a")
    compute(manager, running)
    before = manager.snapshot()
    with pytest.raises(ValueError, match="expected a manager with track_origins=True to invalidate by origin"):
        manager.invalidate(cache_salt="a")
    with pytest.raises(ValueError, match="expected a cache_salt, lora, weight_version or predicate to invalidate"):
        manager.invalidate()
    with pytest.raises(ValueError, match="request 'running' runs; free it before its weight_version changes"):
        running.set_weight_version(2)
    assert manager.snapshot() == before
    with pytest.raises(ValueError, match=r"expected a weight_version that is an integer of 64 bits or text, got 1\.5"):
        request("bad", weight_version=1.5)
    waiting = request("waiting", weight_version=1)
    with pytest.raises(ValueError, match="expected a weight_version that is an integer of 64 bits or text, got True"):
        waiting.set_weight_version(True)
    assert waiting.weight_version == 1


def test_a_predicate_that_fails_changes_nothing() -> None:
    manager = FULL.manager([30], track_origins=True)
    compute(manager, request("running"))
    before = manager.snapshot()
    with pytest.raises(KeyError, match="origin"):
        manager.invalidate(predicate=lambda origin: {}["origin"])
    assert manager.snapshot() == before


def test_tracking_costs_four_bytes_a_block() -> None:
    manager = FULL.manager([1_000], track_origins=True)
    origins = manager.block_pool.origins
    assert origins is not None
    assert origins._number_of.nbytes == 4 * 1_000
    assert manager.block_pool.snapshot().origins == {}
    assert FULL.manager([1_000]).block_pool.origins is None
