"""Runs the laws of `four_devices*.py` where there are four devices: the number is fixed when jax starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LAWS = [str(FOLDER / name) for name in ("four_devices.py", "four_devices_kinds.py")]


@pytest.mark.parametrize("marks", ["not sweep", pytest.param("sweep", marks=pytest.mark.sweep)])
def test_four_virtual_devices(marks: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist", *LAWS]
    result = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": flags}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
