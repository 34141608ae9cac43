"""Engines over a shared store that lies, fails, hangs, is full or dies: greedy tokens are those without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.errors import TierDataError
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.object_backend import ObjectBackend
from kvjax.tiers.tiers import Tiers
from tests.damage import flipped
from tests.engine.engines import assert_no_leak
from tests.engine.step.test_shared_tier import SECRET, close, tiers_of
from tests.engine.step.test_tiers import GREEDY, make_engine, rounds
from tests.models.golden_models import goldens_of
from tests.tiers.shared.stores import UNHURRIED, LyingBackend, Server, memory_store, needs_server

IMPATIENT: dict[str, Any] = {"timeout_s": 0.1, "lookup_timeout_s": 0.05, "retry_s": 0.05}


def backend_with_units(name: str) -> tuple[LyingBackend, list[np.ndarray]]:
    """A store that has what an engine computed, and the tokens that it gave."""
    backend = LyingBackend(ObjectBackend(memory_store()))
    engine = make_engine(name, tiers=tiers_of(SharedTierConfig(store=backend, **UNHURRIED)))
    tokens = rounds(engine, name, 1)
    close(engine)
    return backend, tokens


class Liar:
    """One kind of lie, about a random share of the values."""

    def __init__(self, kind: str, seed: int, rate: float) -> None:
        self.kind, self.rate = kind, rate
        self.rng = np.random.default_rng(seed)
        self.seen: list[bytes] = []  # values of other names
        self.num_lies = 0

    def __call__(self, name: str, value: Any) -> Any:
        if value is None or self.rng.random() >= self.rate:
            return value
        data = bytes(value)
        self.seen.append(data)
        told = self._lie(data)
        self.num_lies += told != data
        return told

    def _lie(self, data: bytes) -> Any:
        place = int(self.rng.integers(len(data)))
        if self.kind == "flipped":
            return flipped(data, place, place % 8)
        if self.kind == "truncated":
            return data[:place]
        if self.kind == "swapped":
            return self.seen[int(self.rng.integers(len(self.seen)))]
        if self.kind == "gone":
            return None
        return self.rng.bytes(len(data))  # "random"


ALL_RATES, SOME_RATES = (1.0, 0.5, 0.1, 0.05), (0.5,)
SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("rates", "secret"),
    [(SOME_RATES, None), *(pytest.param(ALL_RATES, secret, marks=SWEEP) for secret in (None, SECRET))],
)
@pytest.mark.parametrize("kind", ["flipped", "truncated", "swapped", "random", "gone"])
def test_a_lying_store_never_gives_a_wrong_token(kind: str, rates: tuple[float, ...], secret: str | None) -> None:
    backend = LyingBackend(ObjectBackend(memory_store()))
    shared = SharedTierConfig(store=backend, secret=secret, **UNHURRIED)
    first = make_engine("gemma3", tiers=tiers_of(shared))
    expected = rounds(first, "gemma3", 1)
    close(first)
    num_lies = 0
    for seed, rate in enumerate(rates):
        backend.lie = liar = Liar(kind, seed, rate)
        engine = make_engine("gemma3", tiers=tiers_of(shared))
        for own, other in zip(rounds(engine, "gemma3", 1), expected, strict=True):
            np.testing.assert_array_equal(own, other)
        stats = engine.connector.stats
        assert stats.num_load_failures or not liar.num_lies
        assert (kind == "gone") or bool(stats.num_shared_errors) == bool(liar.num_lies)
        num_lies += liar.num_lies
        backend.lie = None
        close(engine)
    assert num_lies > 0


class Moody(LyingBackend):
    """Calls that fail, hang, are late or give wrong answers, by chance."""

    def __init__(self, under: LyingBackend, seed: int) -> None:
        super().__init__(under)
        self.rng = np.random.default_rng(seed)

    async def _before(self) -> None:
        mood = self.rng.random()
        if mood < 0.15:
            raise OSError("planted")
        if mood < 0.2:
            await asyncio.sleep(3600)
        elif mood < 0.4:
            await asyncio.sleep(0.03)

    async def have(self, names: Sequence[str]) -> list[bool]:
        found = await super().have(names)
        return [there if self.rng.random() < 0.9 else not there for there in found]


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 6)]])
def test_random_faults_of_every_kind(seed: int) -> None:
    name = ("gemma3", "jamba")[seed % 2]
    backend, expected = backend_with_units(name)
    backend.lie = Liar(("flipped", "swapped", "gone")[seed % 3], seed, 0.1)
    moody = Moody(backend, seed)
    engine = make_engine(
        name,
        tiers=tiers_of(SharedTierConfig(store=moody, **IMPATIENT), write_through=seed % 4 < 2),
        async_scheduling=seed % 4 == 1,
    )
    for own, other in zip(rounds(engine, name, 3, at_once=1 + seed % 3), expected * 3, strict=True):
        np.testing.assert_array_equal(own, other)
    assert_no_leak(engine)
    assert isinstance(engine.connector, Tiers)
    engine.connector.flush()
    engine.connector.scheduler.check_invariants()
    engine.connector.close()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_beside_a_dead_store_nothing_but_probes_is_sent_once_it_is_known(fault: str) -> None:
    backend, expected = backend_with_units("gemma3")
    backend.hangs, backend.problem = fault == "hangs", OSError("dead") if fault == "fails" else None
    shared = SharedTierConfig(store=backend, timeout_s=0.1, lookup_timeout_s=0.05, retry_s=3600.0)
    engine = make_engine("gemma3", tiers=tiers_of(shared, write_through=False))
    for own, other in zip(rounds(engine, "gemma3", 2), expected * 2, strict=True):
        np.testing.assert_array_equal(own, other)
    engine.connector.flush()
    num_calls = backend.num_calls
    for own, other in zip(rounds(engine, "gemma3", 2), expected * 2, strict=True):
        np.testing.assert_array_equal(own, other)
    assert backend.num_calls == num_calls
    assert engine.tier_stats is not None
    assert "reading from the shared tier" in engine.tier_stats.shared_problem
    with pytest.raises(TierDataError, match="units did not go to the shared store: reading from the shared tier"):
        engine.save_cache()
    engine.connector.close()


@needs_server
@pytest.mark.parametrize("moment", ["lookup", "load", "store"])
def test_a_server_that_is_killed_at_any_moment(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    quick = {"timeout_s": 2.0, "lookup_timeout_s": 2.0, "retry_s": 0.1}
    shared = SharedTierConfig(store=server.url, **quick)
    first = make_engine("gemma3", tiers=tiers_of(shared))
    expected = rounds(first, "gemma3", 1)
    close(first)
    second = make_engine("gemma3", tiers=tiers_of(shared))
    assert isinstance(second.connector, Tiers)
    store = second.connector.shared
    assert store is not None
    method = {"lookup": "_ask", "load": "read", "store": "_write"}[moment]
    call: Callable[..., Any] = getattr(store, method)

    def kill_and_call(*args: Any) -> Any:
        server.end()
        return call(*args)

    monkeypatch.setattr(store, method, kill_and_call)
    prompts = [[7] * 40, *[golden.prompt for golden in goldens_of("gemma3")]] if moment == "store" else None
    if prompts is not None:
        second.generate(prompts[:1], GREEDY)
    for _ in range(2):
        for own, other in zip(rounds(second, "gemma3", 1), expected, strict=True):
            np.testing.assert_array_equal(own, other)
    assert store.stats.num_shared_failures > 0
    second.connector.flush()
    second.connector.close()
