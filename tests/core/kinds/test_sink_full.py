"""Sinks: reserved for good, nobody's, and no part of usage."""

from __future__ import annotations

import numpy as np

from kvjax.core import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    Request,
    SinkFullAttentionSpec,
)
from kvjax.core.step.step_builder import build_step_plan

SPEC = SinkFullAttentionSpec(block_size=4, sink_len=8, num_kv_heads=1, head_size=8, dtype="float32")


def test_sinks_are_dealt_to_nobody_and_outlive_every_request() -> None:
    manager = KVCacheManager(KVCacheConfig.single_pool(8, SPEC), 64, 4)
    [kind] = manager.groups.managers
    assert kind.reserved_block_ids.tolist() == [[1, 2]]
    assert manager.usage == 0.0
    request = Request("r", np.arange(20))
    blocks = manager.allocate_slots(request, 20)
    assert blocks is not None
    assert blocks.get_block_ids() == ([3, 4, 5, 6, 7],)
    assert manager.usage == 1.0
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.usage == 0.0
    assert manager.block_pool.ref_count[[1, 2]].tolist() == [1, 1]


def test_a_plan_names_the_blocks_of_sinks_before_those_of_requests() -> None:
    """Of the group that has them, once for all requests; lengths, slots and tables are those of the requests alone."""
    plain = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(KVCacheConfig.single_pool(12, plain, SPEC), 64, 4)
    request = Request("r", np.arange(6))
    assert manager.allocate_slots(request, 6) is not None
    plan = build_step_plan(manager, np.array([request.row]), np.array([6]))
    assert plan.groups[0].reserved_blocks is None
    assert plan.groups[1].reserved_blocks.tolist() == manager.reserved_blocks(1).tolist() == [1, 2]
    assert plan.groups[1].block_tables.tolist() == [list(manager.get_block_ids("r")[1])]
    assert plan.groups[1].seq_lens.tolist() == [6]
