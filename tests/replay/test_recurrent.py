"""Models with recurrent states: how far their hits are from the best possible."""

from __future__ import annotations

import pytest

from kvjax.configs import load_model_config
from kvjax.planning import Load
from kvjax.replay import ReplayConfig, generate_workload, result_json, run_replay

INTERVAL = 800  # tokens between the states that a prompt leaves; ten blocks of Jamba's


@pytest.mark.parametrize("serial", [False, True])
def test_hits_are_within_the_retention_interval_of_the_best(serial: bool) -> None:
    """A hit ends at a state, so each request may lose up to an interval of what an unbounded cache of blocks has."""
    trace = generate_workload("documents", 60, 0)
    specs = load_model_config("jamba-1.5-mini").kv_cache_specs()
    config = ReplayConfig(
        specs,
        memory_bytes=400 * 10**9,
        load=Load(2_000, max_running=None),
        retention_interval=INTERVAL,
        hash_algorithm="xxhash_cbor",
        serial=serial,
    )
    result = result_json(run_replay(trace, config))
    lost = result["infinite_hit_tokens"] - result["hit_tokens"]
    assert result["infinite_hit_tokens"] > 100 * INTERVAL
    assert 0 <= lost <= len(trace) * INTERVAL
