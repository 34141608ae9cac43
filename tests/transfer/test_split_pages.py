"""Runs the laws of `split_pages.py` where there are eight devices: the number is fixed when jax starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


SWEEP = pytest.param("sweep", marks=(pytest.mark.sweep, pytest.mark.timeout(1_800)))  # one process of 150 cases


@pytest.mark.parametrize("marks", ["not sweep", SWEEP])
def test_eight_virtual_devices(marks: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    laws = str(FOLDER / "split_pages.py")
    done = subprocess.run(
        [*command, laws], env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
