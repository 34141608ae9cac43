"""Engines with tiers: what is loaded from the host or a disk is what was computed, so greedy tokens are the same."""

from __future__ import annotations

import fcntl
import functools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams
from kvjax.errors import EngineClosedError, TierDataError
from kvjax.metrics import EngineMetrics
from kvjax.models import load_model
from kvjax.tiers.config import TierConfig
from kvjax.tiers.stores import disk_store, outage
from kvjax.tiers.stores.disk_store import DiskStore
from kvjax.tiers.tiers import Tiers
from tests.engine.engines import assert_no_leak
from tests.metrics.test_manager_metrics import value
from tests.models.golden_models import goldens_of, model_folder

HOST = 1 << 24
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
MEMORY_BYTES = {"gemma3": 350_000, "jamba": 150_000}  # pools of a request or two


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


def test_what_pools_in_slabs_push_out_is_loaded_from_host_and_disk(tmp_path: Path) -> None:
    """By the engine itself, and by the next one on the same folder."""
    expected = rounds(make_engine("jamba"), "jamba")
    tiers = TierConfig(host_bytes=HOST, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g", write_through=True)
    config = config_of("jamba", one_memory=True, tiers=tiers)
    first = LLMEngine(compiled("jamba").model, config)
    assert first.plan.slabs is not None
    for own, other in zip(rounds(first, "jamba"), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert isinstance(first.connector, Tiers)
    first.connector.flush()
    first.connector.close()
    second = LLMEngine(first.model, config, like=first)
    for own, other in zip(rounds(second, "jamba", 1), expected, strict=False):
        np.testing.assert_array_equal(own, other)
    assert first.connector.stats.num_host_loads > 0
    assert second.connector.stats.num_disk_loads > 0
    for engine in (first, second):
        assert engine.connector.stats.num_load_failures == engine.connector.stats.num_disk_errors == 0


def test_async_scheduling_and_several_requests_at_once() -> None:
    expected = rounds(make_engine("gemma3"), "gemma3")
    config = {"async_scheduling": True, "zero_new_pages": True}
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST), **config)
    for own, other in zip(rounds(engine, "gemma3", at_once=3), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert engine.connector.stats.num_host_loads > 0


@pytest.mark.parametrize("write_through", [False, True])
def test_sleep_and_wake_with_the_host_holding_the_cache(write_through: bool) -> None:
    """Pages are gone from the device; afterwards prompts are loaded, and the tokens are the same."""
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST, write_through=write_through))
    prompt = goldens_of("gemma3")[0].prompt
    (first,) = engine.generate([prompt], GREEDY)
    engine.sleep()
    assert all(array.is_deleted() for array in jax.tree.leaves(engine._runner.pages))
    with pytest.raises(EngineClosedError, match=r"asleep and has no pages; call wake\(\) first"):
        engine.generate([prompt], GREEDY)
    engine.wake()
    (second,) = engine.generate([prompt], GREEDY)
    np.testing.assert_array_equal(first.output_token_ids, second.output_token_ids)
    assert second.stats.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert engine.connector.stats.num_host_loads > 0
    assert_no_leak(engine)


def test_hashes_of_another_weight_version_never_hit(tmp_path: Path) -> None:
    tiers = TierConfig(host_bytes=HOST, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g", write_through=True)
    engine = make_engine("gemma3", tiers=tiers)
    prompt = goldens_of("gemma3")[0].prompt
    engine.set_weights(1)
    (first,) = engine.generate([prompt], GREEDY)
    engine.connector.flush()
    engine.set_weights(2, engine.model.module)
    (second,) = engine.generate([prompt], GREEDY)
    assert second.stats.num_cached_tokens == 0
    np.testing.assert_array_equal(first.output_token_ids, second.output_token_ids)
    engine.set_weights(1)
    (third,) = engine.generate([prompt], GREEDY)
    assert third.stats.num_cached_tokens > 0, "the disk has what version 1 computed"
    with pytest.raises(ValueError, match="expected a weight_version"):
        engine.set_weights(1.5)
    with pytest.raises(ValueError, match="expected a model whose weights have the names, shapes and dtypes"):
        engine.set_weights(3, compiled("jamba").model.module)


def test_pinned_prompts_stay_and_hold_up_sleep() -> None:
    engine = make_engine("gemma3")
    prompts = [golden.prompt for golden in goldens_of("gemma3")]
    engine.generate(prompts[:1], GREEDY)
    pin = engine.pin_prompt(prompts[0])
    assert pin is not None
    with pytest.raises(ValueError, match="expected sleep without pinned prefixes"):
        engine.sleep()
    with pytest.raises(ValueError, match="expected set_weights without pinned prefixes"):
        engine.set_weights(1)
    engine.generate(prompts[1:], GREEDY)
    (again,) = engine.generate([[*prompts[0], 1]], GREEDY)
    assert again.stats.num_cached_tokens >= pin.num_tokens
    engine.unpin_prompt(pin)
    engine.sleep()
    engine.wake()
    (anew,) = engine.generate(prompts[:1], GREEDY)
    assert anew.stats.num_cached_tokens == 0


def test_tenants_with_salts_share_no_block_in_any_tier(tmp_path: Path) -> None:
    tiers = TierConfig(host_bytes=HOST, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g", write_through=True)
    engine = make_engine("gemma3", tiers=tiers)
    prompt = goldens_of("gemma3")[0].prompt
    cached = []
    for salt in ("a", "b", "a"):
        (result,) = engine.generate([prompt], GREEDY, inputs=[{"cache_salt": salt}])
        engine.connector.flush()
        cached.append(result.stats.num_cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_few_bytes_in_flight_make_steps_wait_and_lose_nothing() -> None:
    tiers = TierConfig(host_bytes=HOST, max_bytes_in_flight=1)
    expected = rounds(make_engine("gemma3"), "gemma3", 1)
    for own, other in zip(rounds(make_engine("gemma3", tiers=tiers), "gemma3", 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_a_failed_load_is_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST))
    expected = rounds(engine, "gemma3", 1)

    def fail(*args: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine.connector.worker, "_read_units", fail)
    for own, other in zip(rounds(engine, "gemma3", 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert engine.connector.stats.num_load_failures > 0
    assert engine.connector.host.num_held == 0


def test_a_store_of_another_layout_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    tiers = TierConfig(disk_folder=str(tmp_path), disk_bytes=1 << 20, weights="g")
    make_engine("gemma3", tiers=tiers)
    with pytest.raises(ValueError, match=r"is of another cache: .*layout"):
        make_engine("jamba", tiers=tiers)


def test_a_disk_hit_after_a_restart(tmp_path: Path) -> None:
    tiers = TierConfig(host_bytes=HOST, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g", write_through=True)
    first = make_engine("gemma3", tiers=tiers)
    expected = rounds(first, "gemma3", 1)
    assert isinstance(first.connector, Tiers)
    first.connector.flush()
    first.connector.close()
    second = make_engine("gemma3", tiers=tiers)
    for own, other in zip(rounds(second, "gemma3", 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert second.connector.stats.num_disk_loads > 0
    assert second.connector.stats.num_disk_errors == 0
    assert num_cached(second) > num_cached(first)


@pytest.mark.parametrize("host_bytes", [0, HOST])
def test_a_disk_lock_that_stays_held_costs_one_wait(
    tmp_path: Path, host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on, the metric says it, and `save_cache` raises; once the lock is let go all is kept."""
    monkeypatch.setattr(disk_store, "LOCK_WAIT_S", 0.5)
    tiers = TierConfig(host_bytes=host_bytes, disk_folder=str(tmp_path), disk_bytes=1 << 26, weights="g")
    engine = make_engine("gemma3", tiers=tiers)
    metrics = EngineMetrics(engine)
    engine.add_observer(metrics)
    expected = rounds(make_engine("gemma3"), "gemma3", 3)
    with open(tmp_path / ".lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start_s = time.monotonic()
        for own, other in zip(rounds(engine, "gemma3", 3), expected, strict=True):
            np.testing.assert_array_equal(own, other)
        with pytest.raises(TierDataError, match=r"\d+ units did not go to disk: .* another process holds the lock"):
            engine.save_cache()
        assert time.monotonic() - start_s < 30.0  # of minutes with a wait for each unit
        assert engine.tier_stats.num_disk_outages == 1
        engine.generate([[1, 2, 3]], GREEDY)
        assert value(metrics.registry, "kv_tier_disk_outage") == 1
    monkeypatch.setattr(outage, "CALM_S", 0.0)
    rounds(engine, "gemma3", 1)
    engine.save_cache()
    engine.generate([[1, 2, 3]], GREEDY)
    assert value(metrics.registry, "kv_tier_disk_outage") == 0
    assert engine.tier_stats.num_disk_writes > 0


def test_save_cache_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps would pass it over: each unit is larger than what may be in flight."""
    put = DiskStore.put

    def put_slowly(*args: Any, **options: Any) -> bool:
        time.sleep(0.02)
        return put(*args, **options)

    monkeypatch.setattr(DiskStore, "put", put_slowly)
    folder = str(tmp_path)
    tiers = TierConfig(host_bytes=HOST, disk_folder=folder, disk_bytes=1 << 26, weights="g", max_bytes_in_flight=1)
    engine = make_engine("gemma3", tiers=tiers)
    prompts = [golden.prompt for golden in goldens_of("gemma3")]
    engine.generate(prompts, GREEDY)
    num_cached = sum(int(pool.is_hashed.sum()) for pool in engine.managers[0].block_pools)
    engine.connector.flush()
    before = replace(engine.tier_stats)
    engine.save_cache()
    assert engine.tier_stats.num_disk_skips == before.num_disk_skips
    assert engine.tier_stats.num_disk_writes - before.num_disk_writes > num_cached // 2 > 4


def test_a_load_gives_way_to_urgent_requests_and_writes_no_page_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread brings for it comes when its pages are theirs already, and is dropped; then it is loaded anew."""
    engine = make_engine("gemma3", tiers=TierConfig(host_bytes=HOST))
    prompts = [golden.prompt for golden in goldens_of("gemma3")]
    late, urgent = max(prompts, key=len), [prompt[::-1][:20] for prompt in prompts[:2]]
    long = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
    expected = [engine.generate([late], GREEDY)[0], *make_engine("gemma3").generate(urgent, long)]
    engine.sleep()  # which brings it to the host
    engine.wake()
    assert isinstance(engine.connector, Tiers)
    worker, may_read = engine.connector.worker, threading.Event()
    read = worker._read_units
    monkeypatch.setattr(worker, "_read_units", lambda *args: (may_read.wait(60.0), read(*args))[1])
    engine.add_request(late, GREEDY, request_id="0", priority=1)
    engine.step()
    assert engine._core.loop.scheduler.num_loading == 1
    for i, prompt in enumerate(urgent, start=1):
        engine.add_request(prompt, long, request_id=str(i))
    results: dict[str, GenerationResult] = {}
    while len(results) < 3:
        results |= {one.request_id: one for one in engine.step().results.values()}
        unfinished = engine._core.loop.requests.get("0")
        if unfinished is not None and unfinished.stats.num_preemptions:
            may_read.set()
    for i, one in enumerate(expected):
        np.testing.assert_array_equal(results[str(i)].output_token_ids, one.output_token_ids)
    assert [results[str(i)].stats.num_preemptions for i in range(2)] == [1, 0]
    assert results["0"].stats.num_computed_tokens < len(late)
    assert_no_leak(engine)
    assert engine.connector.host.num_held == 0
