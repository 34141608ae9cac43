"""States that are cached in fewer bits: Hugging Face's tokens from hits on them, and logits close to its own.

What 8 bits do to logits is measured, not promised: docs/capacity.md.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.engine import SpeculativeConfig
from kvjax.tiers.config import TierConfig
from tests.models.families import (
    IN_SLABS,
    Family,
    RecordingEngine,
    assert_golden,
    assert_nothing_is_left,
    engine_config,
    every_recurrent_family,
    loaded,
    run_goldens,
    run_preempted,
)
from tests.models.states.test_hybrids_in_slabs import small_engine

ATOL = 1e-2  # of float32 logits behind hits on states of 16 bits
QWEN = next(family for family in IN_SLABS if family.name == "qwen3_next")


@every_recurrent_family
def test_hits_on_16_bits_go_on_as_the_request_did(family: Family) -> None:
    """In slabs of which every number that nobody has written is NaN; requests are preempted on the way."""
    engine = small_engine(family, 4.0, idle_state_dtype="int16", async_scheduling=True)
    num_hit = 0
    for _ in range(3):
        for golden, result in run_goldens(engine, family):
            assert_golden(engine, golden, result, ATOL)
            num_hit += result.stats.num_cached_tokens
    assert num_hit
    for golden, result in run_preempted(engine, family):
        np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
    engine.step()
    assert_nothing_is_left(engine)


@pytest.mark.sweep
@every_recurrent_family
def test_drafts_leave_what_hits_start_from(family: Family) -> None:
    settings = {"speculative": SpeculativeConfig(num_drafts=2), "idle_state_dtype": "int16"}
    engine = RecordingEngine(loaded(family), engine_config(family, **settings))
    for is_again in (False, True):
        for golden, result in run_goldens(engine, family):
            np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
            assert is_again <= (result.stats.num_cached_tokens > 0 or len(golden.prompt) <= 48)
    assert_nothing_is_left(engine)


@pytest.mark.sweep
def test_tiers_keep_idle_states_as_they_are() -> None:
    engine = small_engine(QWEN, 0.5, idle_state_dtype="int16", tiers=TierConfig(host_bytes=64 << 20))
    for _ in range(3):
        for golden, result in run_goldens(engine, QWEN):
            assert_golden(engine, golden, result, ATOL)
    assert_nothing_is_left(engine)


@pytest.mark.sweep
def test_states_are_cached_in_8_bits() -> None:
    """In parts: the pool of idle states has int8 pages, and hits on them give finite logits."""
    family = Family(QWEN.name)
    engine = RecordingEngine(loaded(family), engine_config(family, idle_state_dtype="int8"))
    ((_, idle_id),) = engine.plan.config.idle_groups
    pool = engine._runner.pages.pools[engine.plan.config.kv_cache_groups[idle_id].pool_id]
    assert [[str(array.dtype) for array in column] for column in pool] == [["float32", "int8", "float32"]] * 2
    for _ in range(2):
        results = run_goldens(engine, family)
    assert all(result.stats.num_cached_tokens for _, result in results)
    assert jax.tree.all(jax.tree.map(lambda rows: np.isfinite(rows).all(), engine.logits))
    assert_nothing_is_left(engine)
