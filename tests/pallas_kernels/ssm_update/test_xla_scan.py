"""The vectorised XLA path of selective_scan against numpy's recurrence (Mamba 1) and dual form (Mamba 2)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cases.states import on_device
from pallas_kernels.ssm_update import selective_scan, xla_scan
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.cases import ScanCase
from pallas_kernels.ssm_update.running_sums import RunningSums
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.ssm_update.test_selective_scan import MAMBA1, small

LENGTHS = ([1, 1, 1, 0, 1], [1, 1, 0, 30, 8], [3, 0, 16, 4, 17], [40], [])


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (small(head_dim=3, groups=2, tokens=40), {"tile_tokens": 8, "trip_bytes": 1 << 12}),
        (small(head_dim=3, groups=1, tokens=40, kept=4, q_dtype="bfloat16"), {"tile_tokens": 16}),
        (small(head_dim=4, groups=6, tokens=40, state_dtype="bfloat16", least_dt=0.1, most_dt=2.0), {}),
        (MAMBA1, {}),
    ],
    ids=str,
)
def test_random_steps(shape: ScanCase, sizes: dict[str, int]) -> None:
    """Decode, several tiles and trips, mixed, drafts with pages of their own, lengths 0 and 1, no sequence."""
    assert_random_steps(shape, sizes)


def test_tiles_end_at_checkpoints() -> None:
    """Of sequences of several tiles, beside drafts."""
    shape = small(head_dim=3, groups=2, tokens=40, kept=3, checkpoints=3)
    assert_random_steps(shape, {"tile_tokens": 8, "trip_bytes": 1 << 12})


def assert_random_steps(shape: ScanCase, sizes: dict[str, Any]) -> None:
    """Steps of `LENGTHS`, with what is done at a time."""
    run = jax.jit(functools.partial(xla_scan.selective_scan, dt_limit=shape.limit, **sizes))
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        given = Scan(*(arrays.get(name) for name in Scan._fields))
        result = run(given, arrays["states"], StepArrays(*on_device(step)).by_column())
        shape.assert_step(result, arrays, step)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_long_decays_are_exact(backend: str) -> None:
    """Sums of time steps in the thousands within a tile: what little survives is right to float32."""
    shape = small(head_dim=3, groups=2, tokens=40, least_dt=20.0, most_dt=200.0)
    arrays, step = shape.step(np.random.default_rng(7), [40])
    arrays["a"] = np.array([-5e-2, -1e-3, -1.0, -5.0, -2e-2, -1e-1], np.float32)
    names = ("x", "states", "dt", "a", "b", "c")
    options = {name: arrays[name] for name in ("d", "dt_bias") if name in arrays}
    given = (*(arrays[name] for name in names), *on_device(step))
    shape.assert_step(selective_scan(*given, **options, dt_limit=shape.limit, backend=backend), arrays, step)


@pytest.mark.parametrize("seed", range(3))
def test_decays_after_a_great_one_keep_their_digits(seed: int) -> None:
    """A full tile of small addends with a few of thousands among them: every decay is that of float64."""
    rng = np.random.default_rng(seed)
    logs = -rng.exponential(0.05, 256).astype(np.float32)
    logs[rng.integers(0, 128, 5)] = -rng.uniform(1e2, 1e4, 5)
    sums = np.cumsum(logs.astype(np.float64))
    expected = np.where(np.tri(256, dtype=bool), np.exp(np.minimum(sums[:, None] - sums, 0.0)), 0.0)
    found = RunningSums.of(logs)
    np.testing.assert_allclose(found.decays(), expected, rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(found.since_start(), np.exp(sums), rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(found.until_end(), np.exp(sums[-1] - sums), rtol=2e-6, atol=1e-37)
