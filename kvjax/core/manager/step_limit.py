"""How many tokens of a request one step should take, so that recurrent states exist where they are cached.

Flow:    SlotAllocator, never_hits -> [limit_step] -> StateSteps, Retention -> tokens
"""

from __future__ import annotations

from collections.abc import Iterable

from kvjax.core.kinds.group_managers import GroupManagers


def limit_step(
    groups: GroupManagers, num_computed: int, num_new: int, num_tokens: int, checkpoints: Iterable[int]
) -> int:
    """How many of `num_new` tokens after `num_computed` one step takes, for a request with checkpoints of its own."""
    state_steps, retention = groups.state_steps, groups.retention
    most = groups.checkpoints_in_step
    if most and retention is not None and state_steps and num_computed % state_steps.block_size == 0:
        if num_computed >= num_tokens - 1:
            return num_new
        end = num_computed + num_new
        between = retention.lengths_between(num_computed, end, checkpoints)
        return retention.end_with_checkpoints(num_computed, end, num_tokens, between, most) - num_computed
    num_new = state_steps.limit(num_computed, num_new, num_tokens)
    if retention is None or not state_steps or num_computed >= num_tokens - 1:
        return num_new
    return retention.step_end(num_computed, num_computed + num_new, checkpoints) - num_computed


__all__ = ["limit_step"]
