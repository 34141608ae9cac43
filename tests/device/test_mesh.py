"""Runs the laws of `four_devices*.py` where there are four devices: the number is fixed when jax starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Compiling for four devices is what takes the time; of what is compiled little runs.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.parametrize("laws", ["four_devices.py", "four_devices_kinds.py"])
def test_four_virtual_devices(laws: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4 {QUICK_COMPILE}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / laws)]
    result = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": flags}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
