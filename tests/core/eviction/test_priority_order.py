"""`PriorityOrder` against a sorted list, with fronts from one block up."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.eviction.priority_order import PriorityOrder
from kvjax.errors import InvariantError


@pytest.mark.parametrize("front_size", [1, 2, 5, 30])
@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_a_sorted_list(seed: int, front_size: int) -> None:
    """Priorities are few, so that equal ones abound; blocks leave from the middle and come back."""
    rng = np.random.default_rng(seed)
    order, model, num_pushes = PriorityOrder(25), [], 0
    order._front_size = front_size
    for _ in range(300):
        queued = [block for _, _, block in model]
        absent = rng.permutation([block for block in range(25) if block not in queued])
        action = rng.choice(["push", "pop", "remove"])
        if action == "push":
            ids = absent[: rng.integers(0, absent.size + 1)].astype(np.int64)
            priorities = rng.integers(0, 6, ids.size).astype(float)
            order.push(ids, priorities)
            for block, priority in zip(ids.tolist(), priorities.tolist(), strict=True):
                model.append((priority, num_pushes, block))
                num_pushes += 1
        elif action == "pop":
            count = int(rng.integers(0, len(model) + 1))
            assert order.pop(count).tolist() == [block for _, _, block in sorted(model)[:count]]
            model = sorted(model)[count:]
        elif model:
            ids = rng.permutation(queued)[: rng.integers(0, 4)].astype(np.int64)
            order.remove(ids)
            model = [entry for entry in model if entry[2] not in ids.tolist()]
        order.check_invariants()
        assert order.num_queued == len(model)
        assert order.order().tolist() == [block for _, _, block in sorted(model)]
        assert order.contains_n(np.arange(25)).tolist() == [b in [e[2] for e in model] for b in range(25)]


def test_the_checker_sees_a_block_that_the_front_lost() -> None:
    order = PriorityOrder(8)
    order.push(np.arange(8), np.arange(8.0))
    order.pop(1)
    order._front = order._front[:, 1:]
    with pytest.raises(InvariantError, match="O1: a block below the bound is not in the front or late"):
        order.check_invariants()
