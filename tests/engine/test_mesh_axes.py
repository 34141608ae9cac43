"""Engines on meshes of several axes give the tokens of one device, which are Hugging Face's: `mesh_program`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = pytest.mark.sweep


def run(name: str, *axes: str) -> None:
    num_devices = math.prod(int(axis.split("=")[1]) for axis in axes if "=" in axis)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    program = [sys.executable, "-m", "tests.engine.mesh_program", name, *axes]
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=280, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama", ("context=2", "tensor=2")),
        pytest.param("llama", ("context=4", "--auto"), marks=SWEEP),
        pytest.param("gemma3", ("context=2", "tensor=2"), marks=SWEEP),
        pytest.param("gemma3", ("context=8",), marks=SWEEP),
        pytest.param("deepseek_v3", ("context=2", "tensor=2"), marks=SWEEP),
        pytest.param("qwen3_next", ("context=2", "tensor=2"), marks=SWEEP),
        pytest.param("whisper", ("context=2", "tensor=2"), marks=SWEEP),
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(name: str, axes: tuple[str, ...]) -> None:
    run(name, *axes)
