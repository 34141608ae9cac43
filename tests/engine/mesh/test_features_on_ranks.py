"""Log-probabilities, penalties, speculation, priorities, sleep and metrics over data ranks: `features_on_ranks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FEATURES = ("sampling", "async", "speculation", "priorities", "life", "metrics")


@pytest.mark.sweep
@pytest.mark.parametrize("feature", FEATURES)
def test_data_ranks_give_what_one_device_gives(feature: str) -> None:
    program = [sys.executable, "-m", "tests.engine.mesh.features_on_ranks", feature]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=290, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
