"""States that change pools around a step: cached ones are loaded for who starts from them, full ones are stored.

Flow:    GroupPlans of `KVCacheConfig.idle_groups` -> [idle_state_moves] -> StepPlan -> kvjax.device
Source:  ARCHITECTURE.md, "Idle states"

A request runs on one state in a running group. The idle group's table is that of `align` states, whose page of a column
gets the state at the column's end. So a step loads where a request starts from a hit, in the first step after its
admission, and stores where one of the states that it leaves is at the end of a block. What a step between two ends
would leave in the idle group nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.group_plans import GroupsStep
from kvjax.core.step.step_plan import GroupPlan, IdleStateMoves


@dataclass(frozen=True)
class _Pair:
    running: GroupPlan
    idle: GroupPlan
    block_size: int


def idle_state_moves(
    config: KVCacheConfig,
    groups: Sequence[GroupPlan],
    step: GroupsStep,
    table: Any,  # with num_start_tokens int64[rows]; asked where there are idle groups
) -> tuple[IdleStateMoves, ...]:
    """What a step moves between each running pool and its idle pool.

    Raises:
        ValueError: a request starts within a block of states, where none is cached.
    """
    if not config.idle_groups:
        return ()
    by_pools: dict[tuple[int, int], list[_Pair]] = {}
    for running_id, idle_id in config.idle_groups:
        pair = _Pair(groups[running_id], groups[idle_id], config.kv_cache_groups[idle_id].kv_cache_spec.block_size)
        by_pools.setdefault((pair.running.pool_id, pair.idle.pool_id), []).append(pair)
    begins = (step.computed > 0) & (step.computed == table.num_start_tokens[step.rows])
    return tuple(
        IdleStateMoves(
            *pools,
            loads=_joined(_loads(pair, step, begins) for pair in pairs),
            stores=_joined(_stores(pair, step) for pair in pairs),
        )
        for pools, pairs in by_pools.items()
    )


def _loads(pair: _Pair, step: GroupsStep, begins: np.ndarray) -> PageCopies:
    is_inside = begins & (step.computed % pair.block_size > 0)
    if is_inside.any():
        i = int(is_inside.argmax())
        raise ValueError(
            f"row {step.rows[i]}: expected to start where a block of {pair.block_size} tokens ends, as idle states do, "
            f"got {step.computed[i]} computed tokens"
        )
    return PageCopies(_states(pair.idle.state_read)[begins], _states(pair.running.state_read)[begins])


def _stores(pair: _Pair, step: GroupsStep) -> PageCopies:
    writes = (pair.running.state_write, pair.idle.state_write)
    sources, destinations = (_states(write).reshape(step.rows.size, -1) for write in writes)
    back = np.arange(sources.shape[1] - 1, -1, -1)  # tokens behind each state
    at_end = (step.seq_lens[:, None] - back) % pair.block_size == 0
    moves = at_end & (sources > 0) & (destinations > 0)  # 0: of a token that is none of the step's
    return PageCopies(sources[moves], destinations[moves])


def _states(pages: np.ndarray | None) -> np.ndarray:
    assert pages is not None  # both groups hold states, as KVCacheConfig checked
    return pages


def _joined(parts: Iterable[PageCopies]) -> PageCopies:
    sources, destinations = zip(*((part.sources, part.destinations) for part in parts), strict=True)
    return PageCopies(np.concatenate(sources), np.concatenate(destinations))


__all__ = ["idle_state_moves"]
