"""Kinds of layers that share one memory: Hugging Face's logits, from slabs that held another kind a moment before."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.engine.step.cache_plans import plan_caches
from tests.models.families import (
    IN_SLABS,
    Family,
    RecordingEngine,
    assert_golden,
    assert_nothing_is_left,
    engine_config,
    loaded,
    run_goldens,
)

OUTSIDE_SWEEPS = ("qwen3_next",)
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[] if family.name in OUTSIDE_SWEEPS else [pytest.mark.sweep])
        for family in IN_SLABS
    ],
)


def small_engine(family: Family, share: float = 0.0, **settings: object) -> RecordingEngine:
    """Its memory holds the longest request, and `share` of as much beside; all bits of all slabs but the null are set.

    So every number that nobody has written is NaN in any dtype.
    """
    plan = plan_caches(loaded(family).config, engine_config(family, **settings), platform="cpu")[0]
    assert plan.slabs is not None
    least = plan.slabs.least_slabs(plan.shape.needs(family.max_model_len, family.max_model_len, 128))
    memory_bytes = int(least * (1 + share)) * plan.slabs.bytes_per_slab
    engine = RecordingEngine(loaded(family), engine_config(family, memory_bytes=memory_bytes, **settings))
    pages = engine._runner.pages
    assert pages.num_bytes <= memory_bytes
    engine._runner.pages = jax.tree.map(lambda memory: memory.at[1:].set(np.uint32(0xFFFFFFFF)), pages)
    return engine


@families
@pytest.mark.parametrize(
    ("async_scheduling", "share"),
    [
        (True, 0.5),
        pytest.param(False, 0.0, marks=pytest.mark.sweep),
        pytest.param(True, 2.0, marks=pytest.mark.sweep),
    ],
)
def test_slabs_change_hands_and_logits_do_not(family: Family, async_scheduling: bool, share: float) -> None:
    """Requests push each other's blocks out, and are pushed out themselves; where slabs are few, in more rounds."""
    engine = small_engine(family, share, async_scheduling=async_scheduling)
    assert engine.manager.slabs is not None
    for num_rounds in range(1, 16):
        for golden, result in run_goldens(engine, family):
            assert_golden(engine, golden, result)
        if num_rounds >= 3 and engine.manager.slabs.num_moved > 10:
            break
    assert engine.manager.slabs.num_moved > 10
    assert_nothing_is_left(engine)
