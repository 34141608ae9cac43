"""Engines on one shared store: what one computed the others load, and tokens are those without it, whatever it does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.engine import LLMEngine, SamplingParams
from kvjax.tiers.config import TierConfig
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.tiers import Tiers
from tests.engine.engines import assert_no_leak
from tests.engine.step.test_tiers import GREEDY, HOST, MEMORY_BYTES, make_engine, num_cached, rounds
from tests.models.golden_models import goldens_of
from tests.tiers.shared.stores import UNHURRIED, config, memory_store, needs_server, server

__all__ = ["config", "server"]  # fixtures


def tiers_of(shared: SharedTierConfig, **settings: Any) -> TierConfig:
    base: dict[str, Any] = {"host_bytes": HOST, "write_through": True, "weights": "g", "shared": shared}
    return TierConfig(**base | settings)


def close(engine: LLMEngine) -> None:
    assert isinstance(engine.connector, Tiers)
    engine.connector.flush()
    engine.connector.close()


SECRET = "correct horse battery staple"
QUICK = [("memory", "gemma3", None), ("folder", "jamba", SECRET), ("redis", "gemma3", SECRET)]
ALL = [
    (kind, name, secret) for kind in ("memory", "folder", "redis") for name in MEMORY_BYTES for secret in (None, SECRET)
]


@functools.cache
def plain_rounds(name: str) -> list[np.ndarray]:
    """Tokens without a tier."""
    return rounds(make_engine(name), name, 1)


@pytest.mark.parametrize(
    ("kind", "name", "secret"),
    [
        pytest.param(
            *case,
            marks=[needs_server] * (case[0] == "redis") + [pytest.mark.sweep] * (case not in QUICK),
            id=f"{case[0]}-{case[1]}-{'plain' if case[2] is None else 'secret'}",
        )
        for case in ALL
    ],
)
def test_the_second_engine_hits_what_the_first_computed(
    config: SharedTierConfig, name: str, secret: str | None
) -> None:
    config = SharedTierConfig(store=config.store, prefix=config.prefix, secret=secret, **UNHURRIED)
    expected = plain_rounds(name)
    first, second = (make_engine(name, tiers=tiers_of(config)) for _ in range(2))
    for own, other in zip(rounds(first, name, 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    first.connector.flush()
    for own, other in zip(rounds(second, name, 1), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    stats = second.connector.stats
    assert stats.num_shared_reads == stats.num_shared_loads > 0
    assert stats.num_load_failures == stats.num_shared_errors == stats.num_shared_failures == 0
    assert num_cached(second) > num_cached(first)
    close(first)
    close(second)


@pytest.mark.parametrize("settings", [{"host_bytes": 0}, {"write_through": False}, {"disk": True}])
def test_below_a_host_a_disk_or_neither(settings: dict[str, Any], tmp_path: Path) -> None:
    """What the disk has is read from there; the second engine has a disk of its own, and finds all in the store."""
    shared = SharedTierConfig(store=memory_store(), **UNHURRIED)
    expected = plain_rounds("gemma3")
    loads = []
    for number in range(2):
        own = dict(settings)
        if own.pop("disk", False):
            own |= {"disk_folder": str(tmp_path / str(number)), "disk_bytes": 1 << 26}
        engine = make_engine("gemma3", tiers=tiers_of(shared, **own))
        for _ in range(2):
            for tokens, other in zip(rounds(engine, "gemma3", 1), expected, strict=True):
                np.testing.assert_array_equal(tokens, other)
            engine.connector.flush()
        engine.save_cache()
        loads.append(engine.connector.stats.num_shared_reads)
        close(engine)
    assert loads[1] > 0


def test_a_request_that_waits_for_an_answer_holds_no_thread_up() -> None:
    """A lone request: the engine waits for the lookup in `wait`, in few steps."""
    shared = SharedTierConfig(store=memory_store(), **UNHURRIED)
    engine = make_engine("gemma3", tiers=tiers_of(shared))
    prompt = goldens_of("gemma3")[0].prompt
    engine.generate([prompt], GREEDY)
    close(engine)
    other = make_engine("gemma3", tiers=tiers_of(shared))
    other.add_request(prompt, SamplingParams(max_tokens=1, temperature=0.0), request_id="a")
    num_steps = 0
    while other.has_work:
        other.step()
        num_steps += 1
    assert other.connector.stats.num_shared_reads > 0
    assert num_steps < 60
    close(other)


def test_weights_of_another_version_or_name_never_hit() -> None:
    shared = SharedTierConfig(store=memory_store(), **UNHURRIED)
    prompt = goldens_of("gemma3")[0].prompt

    def cached(engine: LLMEngine) -> int | None:
        (result,) = engine.generate([prompt], GREEDY)
        engine.connector.flush()
        return result.stats.num_cached_tokens

    engine, like, other = (make_engine("gemma3", tiers=tiers_of(shared, weights=name)) for name in ("g", "g", "h"))
    assert cached(engine) == 0
    assert cached(other) == 0
    assert cached(like)
    for one in (engine, like):
        one.set_weights(1)
        assert one.generate([prompt], GREEDY)[0].stats.num_cached_tokens == (
            0 if one is engine else (len(prompt) - 1) // 8 * 8
        )
        one.connector.flush()
    for one in (engine, like, other):
        close(one)


def test_tenants_with_salts_share_nothing_there() -> None:
    shared = SharedTierConfig(store=memory_store(), **UNHURRIED)
    prompt = goldens_of("gemma3")[0].prompt
    cached = []
    for salt in ("a", "b", "a"):
        engine = make_engine("gemma3", tiers=tiers_of(shared))
        (result,) = engine.generate([prompt], GREEDY, inputs=[{"cache_salt": salt}])
        cached.append(result.stats.num_cached_tokens)
        close(engine)
    assert cached[:2] == [0, 0]
    assert cached[2]


def test_hashes_that_can_be_turned_back_are_refused_with_a_secret() -> None:
    shared = SharedTierConfig(store=memory_store(), secret="correct horse battery staple")
    with pytest.raises(ValueError, match="expected block hashes of sha256 with a secret, got xxhash_cbor"):
        make_engine("gemma3", tiers=tiers_of(shared), hash_algorithm="xxhash_cbor")


def test_prompts_at_once_and_async_scheduling() -> None:
    shared = SharedTierConfig(store=memory_store(), **UNHURRIED)
    expected = plain_rounds("gemma3")
    for _ in range(2):
        engine = make_engine("gemma3", tiers=tiers_of(shared), async_scheduling=True, zero_new_pages=True)
        for own, other in zip(rounds(engine, "gemma3", 1, at_once=3), expected, strict=True):
            np.testing.assert_array_equal(own, other)
        close(engine)
    assert engine.connector.stats.num_shared_reads > 0
    assert_no_leak(engine)
