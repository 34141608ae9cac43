"""Residency metrics: what a sampled block tells, how often blocks are sampled, bulk equal to one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.watch.residency_metrics import KVCacheEvictionEvent, KVCacheMetricsCollector

SECOND = 1_000_000_000


class Clock:
    """Nanoseconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_a_residency_tells_lifetime_idle_time_and_gaps() -> None:
    clock = Clock()
    collector = KVCacheMetricsCollector(1.0, clock=clock)
    pool = BlockPool(2, metrics_collector=collector)
    pool.get_new_blocks(1)
    for second in (1, 3, 4):
        clock.now = second * SECOND
        pool.touch([1])
    clock.now = 9 * SECOND
    pool.free_blocks([1, 1, 1, 1])
    assert collector.drain_events() == []
    pool.get_new_blocks(1)
    assert collector.drain_events() == [KVCacheEvictionEvent(9.0, 5.0, (2.0, 1.0))]
    assert collector.drain_events() == []


def test_without_access_the_block_is_idle_all_its_life() -> None:
    clock = Clock()
    collector = KVCacheMetricsCollector(1.0, clock=clock)
    pool = BlockPool(2, metrics_collector=collector)
    pool.free_blocks([pool.get_new_block()])
    clock.now = 2 * SECOND
    pool.get_new_block()
    assert collector.drain_events() == [KVCacheEvictionEvent(2.0, 2.0, ())]


def test_gaps_are_those_of_the_last_four_accesses() -> None:
    clock = Clock()
    collector = KVCacheMetricsCollector(1.0, clock=clock)
    pool = BlockPool(2, metrics_collector=collector)
    pool.register_many(pool.get_new_blocks(1), [b"h"], 0)
    for second in (1, 2, 4, 8, 16, 32):
        clock.now = second * SECOND
        pool.touch([1])
    pool.evict_blocks([1])
    assert collector.drain_events() == [KVCacheEvictionEvent(32.0, 0.0, (4.0, 8.0, 16.0))]
    pool.evict_blocks([1])
    assert collector.drain_events() == []


def test_a_reset_forgets_without_an_event() -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = BlockPool(4, metrics_collector=collector)
    pool.free_blocks(pool.get_new_blocks(3))
    assert pool.reset_prefix_cache()
    pool.free_blocks(pool.get_new_blocks(2))
    assert collector.drain_events() == []
    collector.reset()
    pool.get_new_blocks(3)
    assert collector.drain_events() == []


def test_what_was_observed_before_a_reset_is_not_afterwards() -> None:
    """Nor when another block is observed again."""
    collector = KVCacheMetricsCollector(1.0)
    residency = collector.attach(4)
    residency.on_blocks_allocated(np.array([1, 2]))
    collector.reset()
    residency.on_blocks_allocated(np.array([3]))
    residency.on_blocks_accessed(np.array([1, 2, 3]))
    residency.on_blocks_evicted(np.array([1, 2, 3]))
    assert len(collector.drain_events()) == 1


def test_what_has_ended_outlives_a_reset() -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = BlockPool(2, metrics_collector=collector)
    for _ in range(2):
        pool.free_blocks(pool.get_new_blocks(1))
    collector.reset()
    assert len(collector.drain_events()) == 1


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 1.0])
def test_the_share_of_sampled_blocks_is_the_rate(rate: float) -> None:
    residency = KVCacheMetricsCollector(rate, seed=3).attach(100_000)
    residency.on_blocks_allocated(np.arange(100_000))
    deviation = (rate * (1 - rate) / 100_000) ** 0.5
    assert residency.num_sampled / 100_000 == pytest.approx(rate, abs=5 * deviation)


def test_the_default_rate_is_one_in_a_hundred() -> None:
    assert KVCacheMetricsCollector().sample_rate == 0.01


def histories(seed: int) -> list[tuple[str, list[int]]]:
    """Calls that a pool of 40 blocks allows, however they are split."""
    rng = random.Random(seed)
    held: list[int] = []
    calls: list[tuple[str, list[int]]] = []
    pool = BlockPool(40, free_order="append")
    for _ in range(80):
        count = rng.randint(0, min(12, pool.num_free_blocks))
        held += (got := pool.get_new_blocks(count).tolist())
        calls.append(("get", got))
        hits = rng.sample(range(1, 40), rng.randint(0, 6))
        pool.touch(hits)
        held += hits
        calls.append(("touch", hits))
        rng.shuffle(held)
        given, held = held[: len(held) // 2], held[len(held) // 2 :]
        pool.free_blocks(given)
        calls.append(("free", given))
    return calls


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_bulk_and_single_calls_draw_the_same(seed: int, rate: float) -> None:
    clock = Clock()
    collectors = [KVCacheMetricsCollector(rate, seed, clock) for _ in range(2)]
    bulk, single = (BlockPool(40, metrics_collector=collector, free_order="append") for collector in collectors)
    num_events = 0
    for step, (call, ids) in enumerate(histories(seed)):
        clock.now = step * SECOND
        if call == "get":
            assert bulk.get_new_blocks(len(ids)).tolist() == ids
            assert [single.get_new_block() for _ in ids] == ids
        elif call == "touch":
            bulk.touch(ids)
            for block_id in ids:
                single.touch([block_id])
        else:
            bulk.free_blocks(ids)
            for block_id in ids:
                single.free_blocks([block_id])
        events = [collector.drain_events() for collector in collectors]
        assert events[0] == events[1]
        num_events += len(events[0])
    assert num_events > 0


def test_pools_do_not_disturb_each_others_draws() -> None:
    alone, shared = KVCacheMetricsCollector(0.2), KVCacheMetricsCollector(0.2)
    one = alone.attach(1_000)
    two, other = shared.attach(1_000), shared.attach(1_000)
    for start in range(0, 1_000, 100):
        one.on_blocks_allocated(np.arange(start, start + 100))
        two.on_blocks_allocated(np.arange(start, start + 100))
        other.on_blocks_allocated(np.arange(start, start + 100))
    assert (one._is_sampled == two._is_sampled).all()
    assert (two._is_sampled != other._is_sampled).any()


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_outside_0_to_1_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"expected sample_rate in \[0, 1\]"):
        KVCacheMetricsCollector(rate)
