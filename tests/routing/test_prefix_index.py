"""A router's index gives each request the hit that the replica would give, for every kind of group."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.core import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheConfig, KVCacheManager, Request
from kvjax.events import EventDecoder, EventEncoder, low_64_bits
from kvjax.events.cached_blocks import CachedBlocks
from kvjax.routing import PrefixIndex

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from random_calls import (
    DEPLOYMENTS,
    HASH_BLOCK_SIZE,
    MAX_MODEL_LEN,
    Deployment,
    RandomCalls,
    chunked,
    full,
    latent,
    latent_window,
    recurrent,
    window,
)

HYBRIDS = {
    "Gemma 3, the window first": Deployment(((window(2, 7), 0), (window(2, 7), 0), (full(2), 0))),
    "Gemma 3n, two windows, three block sizes": Deployment(((window(2, 5), 0), (full(4), 0), (window(6, 9), 1))),
    "GPT-OSS": Deployment(((full(4), 0), (window(4, 8), 0))),
    "Llama 4": Deployment(((full(2), 0), (chunked(2, 8), 0), (chunked(2, 8), 0), (chunked(2, 8), 0))),
    "Qwen3-Next, drafts": Deployment(((full(2), 0), *((recurrent(4, drafts=1), 0),) * 3), {"use_eagle": True}),
    "DeepSeek V4, five caches": Deployment(
        ((latent(8, 4), 0), (latent(8, 8), 0), (latent(8, 4), 1), (latent_window(4, 8), 1), (latent_window(2, 3), 1))
    ),
}
INSIDE_BLOCKS = {name for name, one in DEPLOYMENTS.items() if one.options.get("sub_block_hits")}
SWEPT_STEPS, LATE_STARTS = 10_000, 20


def index_of(manager: KVCacheManager, num_replicas: int = 1) -> PrefixIndex:
    names = ("use_eagle", "dcp_world_size", "pcp_world_size")
    options = {name: getattr(manager.options, name) for name in names}
    return PrefixIndex(num_replicas, manager.kv_cache_config, MAX_MODEL_LEN, HASH_BLOCK_SIZE, **options)


class Followed:
    """A manager under random calls, an index that follows it, and what a publisher would keep of its events."""

    def __init__(self, deployment: Deployment, seed: int, over_the_wire: bool = False) -> None:
        options = {**deployment.options, "enable_kv_cache_events": True}
        self.calls = RandomCalls(replace(deployment, options=options), np.random.default_rng(seed))
        self.manager = self.calls.manager
        self.indices = [index_of(self.manager)]
        self.published = CachedBlocks()
        self.take, self.over_the_wire = self.manager.take_events, over_the_wire
        self.manager.take_events = self.follow  # random calls take events too
        self.num_hits = self.num_resets = 0

    def follow(self) -> list[Any]:
        events = self.take()
        self.published.apply(events)
        if self.over_the_wire:
            events = EventDecoder().decode(EventEncoder().encode(events, 0.0)).events
        for index in self.indices:
            index.apply(0, events)
        return events

    def start_late(self) -> None:
        """Another index, of the snapshot."""
        self.indices = [self.indices[0], index_of(self.manager)]
        self.follow()
        self.indices[1].forget(0)
        for part in self.published.snapshot():
            self.indices[1].apply(0, part)

    def step(self) -> None:
        """A random call; once in a while everything ends and the cache is cleared."""
        rng, calls, manager = self.calls.rng, self.calls, self.manager
        calls.calls[int(np.searchsorted(calls.weights, rng.random()))][0]()
        if rng.random() < 0.005:
            while calls.running:
                manager.free(calls.running.pop())
            while calls.pins:
                manager.unpin(calls.pins.pop())
            calls.reset()
            self.num_resets += 1

    def check(self) -> None:
        self.follow()
        self.manager.new_step_starts()
        request = self.calls.new_request()
        hit = self.manager.get_computed_blocks(request)[1]
        assert [index.match(request) for index in self.indices] == [[hit]] * len(self.indices)
        assert all(index.knows_all(0) for index in self.indices)
        self.num_hits += hit > 0

    def run(self, num_steps: int, steps_of_an_index: int) -> None:
        for step in range(num_steps):
            if step % steps_of_an_index == steps_of_an_index // 2:
                self.start_late()
            self.step()
            self.check()


@pytest.mark.parametrize("over_the_wire", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hits_of_hybrids_are_the_managers(name: str, over_the_wire: bool) -> None:
    """After every admission, step, eviction and reset, and for an index that starts late from a snapshot."""
    followed = Followed(HYBRIDS[name], seed=7, over_the_wire=over_the_wire)
    followed.run(400, 100)
    assert followed.num_hits > 25


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS.keys() - INSIDE_BLOCKS))
def test_hits_of_every_kind_and_option_are_the_managers(name: str) -> None:
    Followed(DEPLOYMENTS[name], seed=11).run(60, 30)


@pytest.mark.sweep
@pytest.mark.parametrize("name", HYBRIDS)
def test_hits_of_hybrids_are_the_managers_for_long(name: str) -> None:
    followed = Followed(HYBRIDS[name], seed=3)
    followed.run(SWEPT_STEPS, SWEPT_STEPS // LATE_STARTS)
    assert followed.num_hits > SWEPT_STEPS // 20
    assert followed.num_resets > 10
    assert sum(pool.num_evicted_blocks for pool in followed.manager.block_pools) > SWEPT_STEPS // 100


@pytest.mark.parametrize("name", sorted(INSIDE_BLOCKS))
def test_hits_inside_blocks_are_counted_up_to_the_last_whole_one(name: str) -> None:
    followed = Followed(DEPLOYMENTS[name], seed=5)
    for _ in range(60):
        followed.step()
        followed.follow()
        followed.manager.new_step_starts()
        request = followed.calls.new_request()
        assert followed.indices[0].match(request)[0] <= followed.manager.get_computed_blocks(request)[1]


# -- one group of full attention, by hand

CONFIG = KVCacheConfig.single_pool(100, full(2))
HASHES = [bytes([i]) * 32 for i in range(1, 5)]


def hand_made(num_replicas: int = 1) -> PrefixIndex:
    return PrefixIndex(num_replicas, CONFIG, 64, 2)


def stored(*hashes: Any, **fields: Any) -> BlockStored:
    return BlockStored(
        **{"block_hashes": hashes, "parent_block_hash": None, "token_ids": (), "block_size": 2, **fields}
    )


def hits(index: PrefixIndex) -> list[int]:
    return index.match(Request("asked", [0] * 9, block_hashes=list(HASHES)))


def test_a_hash_is_gone_with_the_last_of_its_blocks() -> None:
    index = hand_made(2)
    index.apply(0, [stored(*HASHES[:2]), stored(HASHES[0]), stored(HASHES[0])])
    for num_left in (4, 4, 0, 0):
        index.apply(0, [BlockRemoved((HASHES[0],))])
        assert hits(index) == [num_left, 0]
    assert index.num_blocks(0) == 1


@pytest.mark.parametrize("seed", range(20))
def test_digests_and_numbers_of_either_sign_are_one_hash(seed: int) -> None:
    """As their low 64 bits: SGLang's numbers are signed, vLLM's are not, digests may be as short as those."""
    rng, index = np.random.default_rng(seed), hand_made()
    digests = [rng.bytes(int(rng.choice([8, 16, 32]))) for _ in range(4)]
    forms = [
        [int(rng.choice([0, 1, 2])), digest, low_64_bits(digest), int.from_bytes(digest[-8:], "big", signed=True)]
        for digest in digests
    ]
    index.apply(0, [stored(*[form[1 + form[0]] for form in forms])])
    asked = Request("asked", [0] * 9, block_hashes=digests)
    assert index.match(asked) == [8]
    index.apply(0, [BlockRemoved(tuple(form[1 + (form[0] + 1) % 3] for form in forms))])
    assert index.match(asked) == [0]


def test_a_request_that_reads_no_cache_hits_nothing() -> None:
    index = hand_made()
    index.apply(0, [stored(*HASHES)])
    assert hits(index) == [8]
    asked = Request("asked", [0] * 9, block_hashes=list(HASHES), skip_reading_prefix_cache=True)
    assert index.match(asked) == [0]


def test_blocks_in_other_memory_are_no_hits() -> None:
    index = hand_made()
    index.apply(0, [stored(*HASHES, medium="CPU"), stored(HASHES[0], medium=None), stored(HASHES[1])])
    index.apply(0, [BlockRemoved((HASHES[1],), medium="STORAGE")])
    assert hits(index) == [4]


def test_a_forgotten_replica_has_nothing_until_all_is_told() -> None:
    index = hand_made(2)
    for replica in range(2):
        index.apply(replica, [stored(*HASHES)])
    index.forget(0)
    assert (hits(index), index.knows_all(0), index.knows_all(1)) == ([0, 8], False, True)
    index.apply(0, [BlockRemoved((HASHES[3],)), stored(HASHES[0])])
    assert (hits(index), index.knows_all(0)) == ([2, 8], False)
    index.apply(0, [AllBlocksCleared(), stored(*HASHES[:2])])
    assert (hits(index), index.knows_all(0)) == ([4, 8], True)


@pytest.mark.parametrize(
    "event",
    [
        stored(HASHES[0], group_idx=1),
        stored(HASHES[0], group_idx=-1),
        stored(HASHES[0], block_size=4),
        BlockRemoved((HASHES[0],), group_idx=1),
    ],
)
def test_events_of_other_groups_make_the_replica_unknown(event: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The index says so, once, and whoever asks is told."""
    index = hand_made()
    with caplog.at_level(logging.WARNING):
        index.apply(0, [stored(*HASHES), event, event])
    assert (hits(index), index.knows_all(0)) == ([0], False)
    assert caplog.text.count("expected groups with blocks of [2] tokens") == 1


def test_an_event_of_no_group_is_of_the_only_one() -> None:
    """Older releases do not tell the group; with several groups nobody knows which it was."""
    event = stored(*HASHES, group_idx=None)
    index = hand_made()
    index.apply(0, [event])
    assert (hits(index), index.knows_all(0)) == ([8], True)
    hybrid = PrefixIndex(1, KVCacheConfig.single_pool(100, full(2), window(2, 5)), 64, 2)
    hybrid.apply(0, [event])
    assert not hybrid.knows_all(0)


def test_what_cannot_be_indexed_is_refused() -> None:
    with pytest.raises(ValueError, match="expected num_replicas >= 1, got 0"):
        hand_made(0)
    with pytest.raises(ValueError, match="expected hash_block_size to divide the block size of every group"):
        PrefixIndex(1, CONFIG, 64, 3)
    followed = Followed(HYBRIDS["Llama 4"], seed=1)
    request = Request("asked", range(9), block_hasher=replace(followed.calls.hasher, block_size=4))
    with pytest.raises(ValueError, match="expected a block_hasher of hash_block_size = 2 tokens, got 4"):
        followed.indices[0].match(request)
