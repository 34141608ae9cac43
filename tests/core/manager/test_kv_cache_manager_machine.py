"""Random lives of many requests: the manager and the naive model agree on every answer and every bit of state.

A few hundred steps of every deployment; ten thousand of every kind and of five hybrids in the nightly setting:

    pytest -m sweep -s tests/core/manager/test_kv_cache_manager_machine.py
"""

from __future__ import annotations

import time

import pytest
from hypothesis import settings

from tests.core.manager.manager_lockstep import HYBRIDS, KINDS, SETUPS, Setup
from tests.core.manager.manager_machine import run_machine

NIGHTLY_STEPS = 10_000
NIGHTLY_EXAMPLES = 100  # of at most 50 steps; one seed each time


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_agrees_with_the_naive_model(setup: Setup) -> None:
    assert run_machine(setup, settings(max_examples=settings.default.max_examples // 16)) > 100


@pytest.mark.sweep
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("name", [*KINDS, *HYBRIDS])
def test_agrees_with_the_naive_model_for_ten_thousand_steps(name: str) -> None:
    start, steps, rounds = time.perf_counter(), 0, 0
    while steps < NIGHTLY_STEPS:
        run_settings = settings(max_examples=NIGHTLY_EXAMPLES, database=None)
        steps += run_machine(SETUPS[name], run_settings, run_seed=rounds)
        rounds += 1
    taken = time.perf_counter() - start
    print(f"{name:20} seeds 0 to {rounds - 1}, {rounds * NIGHTLY_EXAMPLES} lives, {steps:,} steps, {taken:.0f} s")
