"""Every token of a step lies on exactly one rank, where that rank's own blocks have its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import FullAttentionSpec, KVCacheConfig, KVCacheManager, MLAAttentionSpec, Request
from kvjax.core.step.context_parallel import lengths_of_rank, slots_of_rank
from kvjax.core.step.step_builder import build_step_plan

BLOCK_SIZE = 4
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
LATENT = MLAAttentionSpec(block_size=BLOCK_SIZE, head_size=8, dtype="float32", tokens_per_state=2)


@pytest.mark.parametrize(
    "ranks", [{"dcp_world_size": 2}, {"pcp_world_size": 3}, dict.fromkeys(("dcp_world_size", "pcp_world_size"), 2)]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_step_is_dealt_to_the_ranks(ranks: dict[str, Any], seed: int) -> None:
    """The model: what is after t tokens lies on rank t % ranks, behind the t // ranks that came there before."""
    num_ranks = int(np.prod(list(ranks.values())))
    manager = KVCacheManager(KVCacheConfig.single_pool(60, FULL, LATENT), 200, BLOCK_SIZE, **ranks)
    assert [manager.block_size(group_id) for group_id in range(2)] == [BLOCK_SIZE * num_ranks] * 2
    rng = np.random.default_rng(seed)
    requests = [Request(f"r{i}", range(int(rng.integers(1, 40)))) for i in range(3)]
    num_new = []
    for request in requests:
        done = int(rng.integers(0, request.num_tokens))
        if done:
            assert manager.allocate_slots(request, done) is not None
            request.num_computed_tokens = done
        num_new.append(request.num_tokens - done)
        assert manager.allocate_slots(request, num_new[-1]) is not None
    plan = build_step_plan(manager, np.array([request.row for request in requests]), np.array(num_new))
    for group, ratio in zip(plan.groups, (1, 2), strict=True):
        page_size = BLOCK_SIZE // ratio
        places = []  # (rank, page, offset) of every new state
        for name, row_ids, start, count in zip(
            plan.request_ids, group.block_tables, plan.num_computed_tokens, plan.num_new_tokens, strict=True
        ):
            assert [block for block in row_ids.tolist() if block] == manager.get_block_ids(name)[ratio - 1]
            for state in range(start // ratio, (start + count) // ratio):
                local = state // num_ranks
                places.append((state % num_ranks, int(row_ids[local // page_size]), local % page_size))
        for rank in range(num_ranks):
            expected = [page * page_size + offset if own == rank else -1 for own, page, offset in places]
            assert slots_of_rank(group.slot_mapping, rank, num_ranks).tolist() == expected
            lengths = lengths_of_rank(group.seq_lens, rank, num_ranks)
            assert lengths.tolist() == [len(range(rank, length, num_ranks)) for length in group.seq_lens.tolist()]


def test_a_slot_that_is_not_written_is_nobodys() -> None:
    assert slots_of_rank(np.array([-1, 5, 4]), 1, 2).tolist() == [-1, 2, -1]


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank: int) -> None:
    for deal in (slots_of_rank, lengths_of_rank):
        with pytest.raises(ValueError, match=rf"expected a rank in \[0, 2\), got {rank}"):
            deal(np.zeros(1, np.int32), rank, 2)
