"""Routers that read nothing but the published bytes know what the managers cache, and what a prompt would hit."""

from __future__ import annotations

from collections import Counter

import pytest

from kvjax.core import AllBlocksCleared, KVCacheManager, ReleaseRules
from kvjax.events import EventDecoder, EventEncoder, KVEventsConfig, ZmqEventPublisher, low_64_bits
from tests.events.consumers import DualKeyIndex, Place, RadixIndex, chunks, local_hash
from tests.events.sockets.subscriber import Subscriber
from tests.events.workload import (
    FULL,
    HASH_BLOCK_SIZE,
    HASHER,
    HYBRID,
    SETUPS,
    SIZES,
    Workload,
    cached_blocks,
    make_manager,
)

NUM_STEPS = 150
LOOPBACK = "tcp://127.0.0.1:*"
MAIN_GROUPS = {name: [i for i, group in enumerate(groups) if group.window is None] for name, groups in SETUPS.items()}


def published(manager: KVCacheManager, **options) -> object:
    """The events of a step after a trip through the bytes."""
    return EventDecoder().decode(EventEncoder(**options).encode(manager.take_events(), 0.0, 0))


def main_references(manager: KVCacheManager, main_groups: list[int]) -> Counter[int]:
    cached = cached_blocks(manager)
    references: Counter[int] = Counter()
    for group_id in main_groups:
        references.update({low_64_bits(block_hash): count for block_hash, count in cached[group_id].items()})
    return references


def check_radix(index: RadixIndex, worker: str, manager: KVCacheManager, main_groups: list[int]) -> None:
    """The tree has exactly the manager's hits of main attention, each at the place of its tokens."""
    references = main_references(manager, main_groups)
    assert index.references.get(worker, Counter()) == references
    nodes = index.nodes.get(worker, {})
    assert nodes.keys() == references.keys()
    assert all(worker in node.workers for node in nodes.values())
    assert index.num_orphans == 0


def check_dual_key(index: DualKeyIndex, pod: str, manager: KVCacheManager) -> None:
    """Every group's hits, under the router's own keys."""
    expected = {
        (Place(pod, "gpu", group_id), low_64_bits(block_hash)): count
        for group_id, hashes in cached_blocks(manager).items()
        for block_hash, count in hashes.items()
    }
    assert {key: count for key, count in index.references.items() if key[0].pod == pod} == expected
    stored = {(place, key) for key, places in index.places.items() for place in places if place.pod == pod}
    assert stored == {
        (place, key) for place, block_hash in expected for key in index.request_keys_of[place, block_hash]
    }
    assert index.num_orphans == 0


def num_hit_tokens(manager: KVCacheManager, work: Workload, tokens: list[int]) -> int:
    return manager.get_computed_blocks(work.request(tokens))[1]


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(3))
def test_the_indexes_equal_the_managers_own(name: str, seed: int) -> None:
    radix, dual = RadixIndex(), DualKeyIndex("model", HASH_BLOCK_SIZE)
    works = {
        pod: Workload(
            make_manager(SETUPS[name], 24 + 12 * i, eviction_policy="lru", rules=ReleaseRules(free_order=order)),
            seed * 2 + i,
        )
        for i, (pod, order) in enumerate([("pod-0", "append"), ("pod-1", "uncached_first")])
    }
    num_evicted = num_hits = 0
    for step in range(NUM_STEPS):
        for pod, work in works.items():
            work.step()
            batch = published(work.manager)
            radix.apply(pod, batch)
            dual.apply(pod, batch)
            if step % 10 == 9:
                check_radix(radix, pod, work.manager, MAIN_GROUPS[name])
                check_dual_key(dual, pod, work.manager)
                tokens = work.prompt()
                hit = num_hit_tokens(work.manager, work, tokens)
                assert dual.longest_hit(pod, tokens) == hit
                num_hits += hit > 0
            num_evicted += sum(pool.num_evicted_blocks for pool in work.manager.block_pools)
    assert num_evicted
    assert num_hits
    assert sum(work.num_preemptions for work in works.values())
    assert sum(work.num_resets for work in works.values())


@pytest.mark.parametrize("seed", range(5))
def test_lookups_of_full_attention_equal_the_managers(seed: int) -> None:
    """Scores of both routers, cut to leave one token to compute, are the hits of each manager."""
    radix, dual = RadixIndex(), DualKeyIndex("model", HASH_BLOCK_SIZE)
    works = {f"pod-{i}": Workload(make_manager(FULL, 30), seed * 3 + i) for i in range(3)}
    num_hits = 0
    for _ in range(100):
        for pod, work in works.items():
            work.step()
            batch = published(work.manager)
            radix.apply(pod, batch)
            dual.apply(pod, batch)
        tokens = works["pod-0"].prompt()
        blocks = chunks(tokens, HASH_BLOCK_SIZE)
        scores = radix.find_matches([(local_hash(block), None) for block in blocks])
        assert scores == dual.score(tokens)
        for pod, work in works.items():
            usable = min(scores[pod], (len(tokens) - 1) // HASH_BLOCK_SIZE)
            assert usable * HASH_BLOCK_SIZE == num_hit_tokens(work.manager, work, tokens)
            num_hits += usable > 0
    assert num_hits > 20


@pytest.mark.parametrize("seed", range(3))
def test_salted_prompts_share_nothing(seed: int) -> None:
    salts = (None, "a", "b")
    radix, work = RadixIndex(), Workload(make_manager(FULL, 40), seed, salts)
    for _ in range(NUM_STEPS):
        work.step()
        radix.apply("pod", published(work.manager))
        tokens = work.prompt()
        request = work.request(tokens)
        blocks = chunks(tokens, HASH_BLOCK_SIZE)
        salt = request.extra_keys_of_block(0, HASH_BLOCK_SIZE)
        first = None if salt is None else (salt[0][1],)
        keys = [(local_hash(block), first if i == 0 else None) for i, block in enumerate(blocks)]
        usable = min(radix.find_matches(keys)["pod"], (len(tokens) - 1) // HASH_BLOCK_SIZE)
        assert usable * HASH_BLOCK_SIZE == work.manager.get_computed_blocks(request)[1]
    check_radix(radix, "pod", work.manager, [0])


def test_groups_are_told_with_kind_block_size_and_window() -> None:
    work, dual = Workload(make_manager(SIZES, 40), 0), DualKeyIndex("model", HASH_BLOCK_SIZE)
    for _ in range(10):
        work.step()
        dual.apply("pod", published(work.manager))
    described = {group: (info.kind, info.block_size, info.window) for (_, group), info in dual.groups.items()}
    assert described == {
        0: ("full_attention", 4, None),
        1: ("sliding_window", 2, 5),
        2: ("sliding_window", 2, 3),
    }


def test_a_clearing_empties_both_indexes_of_one_worker_only() -> None:
    radix, dual = RadixIndex(), DualKeyIndex("model", HASH_BLOCK_SIZE)
    works = {pod: Workload(make_manager(HYBRID, 40), seed) for seed, pod in enumerate(("pod-0", "pod-1"))}
    for _ in range(30):
        for pod, work in works.items():
            work.step()
            batch = published(work.manager)
            radix.apply(pod, batch)
            dual.apply(pod, batch)
    work = works["pod-0"]
    work._reset()
    events = work.manager.take_events()
    assert events.count(AllBlocksCleared()) == 1
    batch = EventDecoder().decode(EventEncoder().encode(events, 0.0, 0))
    radix.apply("pod-0", batch)
    dual.apply("pod-0", batch)
    assert "pod-0" not in radix.nodes
    assert {place.pod for places in dual.places.values() for place in places} == {"pod-1"}
    check_radix(radix, "pod-1", works["pod-1"].manager, [0])
    check_dual_key(dual, "pod-1", works["pod-1"].manager)


def test_digests_index_as_integers_do() -> None:
    """A consumer that takes the last 8 bytes of a digest ends with the same keys."""
    by_digest, by_int = DualKeyIndex("model", HASH_BLOCK_SIZE), DualKeyIndex("model", HASH_BLOCK_SIZE)
    works = [Workload(make_manager(HYBRID, 30), 7) for _ in range(2)]
    for _ in range(NUM_STEPS):
        for work, index, is_int in zip(works, (by_digest, by_int), (False, True), strict=True):
            work.step()
            index.apply("pod", published(work.manager, int_block_hashes=is_int))
    assert by_digest.places == by_int.places
    check_dual_key(by_digest, "pod", works[0].manager)


def test_over_the_wire_with_losses() -> None:
    """Two ranks, each with its publisher; one subscriber loses a third of the messages, the other comes late."""
    radix, dual = RadixIndex(), DualKeyIndex("model", HASH_BLOCK_SIZE)
    config = KVEventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, topic="kv@pod@model")
    works = [Workload(make_manager(HYBRID, 30), 5 + rank) for rank in range(2)]
    publishers = [ZmqEventPublisher(config, rank) for rank in range(2)]
    decoder = EventDecoder()

    def apply(payload: bytes) -> None:
        batch = decoder.decode(payload)
        radix.apply(f"rank-{batch.data_parallel_rank}", batch)
        dual.apply(f"rank-{batch.data_parallel_rank}", batch)

    def run(rank: int) -> int:
        works[rank].step()
        events = works[rank].manager.take_events()
        publishers[rank].publish(events)
        return bool(events)

    addresses = [(publisher.endpoint, publisher.replay_endpoint) for publisher in publishers]
    num_late = sum(run(1) for _ in range(20))
    with (
        Subscriber(*addresses[0], apply, topic="kv@", lose=lambda seq: seq % 3 == 1) as lossy,
        Subscriber(*addresses[1], apply, topic="kv@") as late,
    ):
        num_published = [0, num_late]
        for _ in range(NUM_STEPS):
            for rank, subscriber in enumerate((lossy, late)):
                num_published[rank] += run(rank)
                subscriber.poll(1)
        for rank, subscriber in enumerate((lossy, late)):
            while subscriber.next_seq < num_published[rank]:
                subscriber.catch_up()
            assert subscriber.num_replayed
    for publisher in publishers:
        publisher.shutdown()
    for rank, work in enumerate(works):
        check_radix(radix, f"rank-{rank}", work.manager, [0])
        check_dual_key(dual, f"rank-{rank}", work.manager)


def test_the_local_hash_is_dynamos() -> None:
    assert local_hash([1, 2, 3, 4]) == 14643705804678351452


def test_parent_and_tokens_give_the_published_hashes() -> None:
    """What a router computes from parent and tokens is what the manager published."""
    work = Workload(make_manager(FULL, 30), 3)
    for _ in range(40):
        work.step()
        for event in published(work.manager, int_block_hashes=False).events:
            if hasattr(event, "token_ids"):
                assert event.block_hashes == HASHER.hash_tokens(event.token_ids, event.parent_block_hash)
