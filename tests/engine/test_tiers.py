"""Engines with tiers: what is loaded from the host or a disk is what was computed, so greedy tokens are the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.models import load_model
from kvjax.tiers.config import TierConfig
from kvjax.tiers.tiers import Tiers
from tests.engine.engines import assert_no_leak
from tests.models.golden_models import goldens_of, model_folder

HOST = 1 << 24
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
MEMORY_BYTES = {"gemma3": 350_000, "jamba": 200_000}  # pools of a request or two


@functools.cache
def compiled(name: str) -> LLMEngine:
    return LLMEngine(load_model(model_folder(name), "float32"), config_of(name))


def config_of(name: str, **settings: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "block_size": 8,
        "memory_bytes": MEMORY_BYTES[name],
        "max_model_len": 136,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_buckets": 1,
    }
    return EngineConfig(**base | settings)


def make_engine(name: str, **settings: Any) -> LLMEngine:
    like = compiled(name)
    return LLMEngine(like.model, config_of(name, **settings), like=like)


def rounds(engine: LLMEngine, name: str, num_rounds: int = 2, at_once: int = 1) -> list[np.ndarray]:
    """The family's prompts, again and again: more than the pools hold."""
    prompts = [golden.prompt for golden in goldens_of(name)] * num_rounds
    outputs = []
    for first in range(0, len(prompts), at_once):
        for result in engine.generate(prompts[first : first + at_once], GREEDY):
            outputs.append(result.output_token_ids)
        assert_no_leak(engine)
    if isinstance(engine.connector, Tiers):
        engine.connector.scheduler.check_invariants()
    return outputs


def num_cached(engine: LLMEngine) -> int:
    return sum(step.num_hit_tokens for step in engine.step_stats)


@pytest.mark.parametrize("name", ["gemma3", "jamba"])
def test_greedy_tokens_are_those_without_tiers(name: str) -> None:
    plain = make_engine(name)
    expected = rounds(plain, name)
    engine = make_engine(name, tiers=TierConfig(host_bytes=HOST))
    for own, other in zip(rounds(engine, name), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert engine.connector.stats.num_host_loads > 0
    assert engine.connector.stats.num_load_failures == 0
    assert num_cached(engine) > num_cached(plain)


def test_async_scheduling_and_several_requests_at_once() -> None:
    expected = rounds(make_engine("gemma3"), "gemma3")
    config = {"async_scheduling": True, "zero_new_pages": True}
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST), **config)
    for own, other in zip(rounds(engine, "gemma3", at_once=3), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert engine.connector.stats.num_host_loads > 0


def test_write_through_keeps_what_pools_held() -> None:
    """A second engine over the same host memory finds what the first never evicted."""
    expected = rounds(make_engine("gemma3"), "gemma3", 1)
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST, write_through=True))
    for own, other in zip(rounds(engine, "gemma3", 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert engine.connector.stats.num_stored > 40


def test_a_disk_hit_after_a_restart(tmp_path: Path) -> None:
    tiers = TierConfig(host_bytes=HOST, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g", write_through=True)
    first = make_engine("gemma3", tiers=tiers)
    expected = rounds(first, "gemma3", 1)
    assert isinstance(first.connector, Tiers)
    first.connector.worker.flush()
    first.connector.close()
    second = make_engine("gemma3", tiers=tiers)
    for own, other in zip(rounds(second, "gemma3", 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert second.connector.stats.num_disk_loads > 0
    assert second.connector.stats.num_disk_errors == 0
    assert num_cached(second) > num_cached(first)
