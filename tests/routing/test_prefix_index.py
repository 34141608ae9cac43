"""A router's index knows what the managers have cached, and nothing else."""

from __future__ import annotations

from itertools import takewhile

import pytest

from kvjax.core import AllBlocksCleared, BlockRemoved
from kvjax.events import EventDecoder, EventEncoder, low_64_bits
from kvjax.routing import PrefixIndex
from tests.events.workload import FULL, HYBRID, Workload, cached_blocks, make_manager


@pytest.mark.parametrize("over_the_wire", [False, True])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_leading_blocks_are_those_that_the_managers_have(groups: tuple, over_the_wire: bool) -> None:
    """Of two managers with small pools, under evictions, preemptions and resets, after every step."""
    managers = [make_manager(groups, 24) for _ in range(2)]
    workloads = [Workload(manager, seed) for seed, manager in enumerate(managers)]
    index = PrefixIndex(2)
    for _ in range(120):
        for replica, workload in enumerate(workloads):
            workload.step()
            events = workload.manager.take_events()
            index.apply(
                replica, EventDecoder().decode(EventEncoder().encode(events, 0.0)).events if over_the_wire else events
            )
        cached = [{low_64_bits(key) for key in cached_blocks(manager)[0]} for manager in managers]
        hashes = workloads[0].request(workloads[0].prompt()).block_hashes
        matched = [len(list(takewhile(lambda key: low_64_bits(key) in blocks, hashes))) for blocks in cached]  # noqa: B023
        assert index.match(hashes) == matched
        assert [index.num_blocks(replica) for replica in range(2)] == list(map(len, cached))
    assert all(workload.num_resets for workload in workloads)
    assert any(workload.num_preemptions for workload in workloads)


def test_a_forgotten_replica_has_nothing() -> None:
    manager = make_manager(FULL, 50)
    workload, index = Workload(manager, 3), PrefixIndex(2)
    for _ in range(20):
        workload.step()
    events = manager.take_events()
    for replica in range(2):
        index.apply(replica, events)
    assert index.num_blocks(0) == index.num_blocks(1) > 0
    index.forget(0)
    assert (index.num_blocks(0), index.num_blocks(1) > 0) == (0, True)
    index.apply(0, [BlockRemoved((bytes(32),)), AllBlocksCleared()])
    assert index.num_blocks(0) == 0


@pytest.mark.parametrize("arguments", [(0,), (1, -1)])
def test_no_replicas_and_negative_groups_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="num_replicas >= 1 and group_idx >= 0"):
        PrefixIndex(*arguments)
