"""Engines on meshes of several axes give the tokens of one device, which are Hugging Face's: `mesh_program`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = pytest.mark.sweep
ROOT = Path(__file__).parents[3]
FAMILIES = ("llama", "gemma3", "deepseek_v3", "qwen3_next")
ALL_AXES = ("data=2", "context=2", "tensor=2")


def run(*arguments: str, num_processes: int = 1, folder: Path | None = None) -> None:
    """`mesh_program` on as many devices as the axes need, shared by so many processes; `folder` follows "--tiers"."""
    num_devices = math.prod(int(axis.split("=")[1]) for axis in arguments if "=" in axis)
    told = [f"--tiers={folder}" if argument == "--tiers" else argument for argument in arguments]
    program = [sys.executable, "-m", "tests.engine.mesh.mesh_program", *told]
    if num_processes > 1:
        launch = [str(ROOT / "scripts" / "launch_local.sh"), str(num_processes), str(num_devices // num_processes)]
        program = [*launch, "--", *program]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=290, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama", (*ALL_AXES, "--tiers")),
        *[
            pytest.param(name, axes, marks=SWEEP)
            for name in FAMILIES
            for axes in (ALL_AXES, ("data=2",), ("context=4", "--auto"), ("tensor=4",), ("context=2", "tensor=2"))
            if (name, axes) != ("llama", ALL_AXES)  # above, with tiers
        ],
        pytest.param("whisper", ("context=2", "tensor=2"), marks=SWEEP),
        *[
            pytest.param(name, (*axes, "--one-memory"), marks=SWEEP)
            for name in ("qwen3_next", "kimi_linear")
            for axes in (ALL_AXES, ("data=2",), ("tensor=4",), ("context=2", "tensor=2"))
        ],
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(name: str, axes: tuple[str, ...], tmp_path: Path) -> None:
    run(name, *axes, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param("llama", ("tensor=4",), marks=SWEEP),
        pytest.param("gemma3", ("context=2", "tensor=2"), marks=SWEEP),
        pytest.param("deepseek_v3", ("context=2",), marks=SWEEP),
        pytest.param("qwen3_next", ("context=2", "tensor=2"), marks=SWEEP),
        *[pytest.param(name, axes, marks=SWEEP) for name in FAMILIES for axes in (ALL_AXES, ("data=2",))],
    ],
)
def test_host_and_disk_give_back_what_a_mesh_computed(name: str, axes: tuple[str, ...], tmp_path: Path) -> None:
    run(name, *axes, "--tiers", folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama", ("context=2",)),
        *[pytest.param(name, ALL_AXES, marks=SWEEP) for name in FAMILIES],
        pytest.param("gemma3", ("tensor=2", "data=2"), marks=SWEEP),  # each process has half of both data ranks
        pytest.param("llama", ("tensor=4",), marks=SWEEP),
        pytest.param("deepseek_v3", ("context=2", "tensor=2"), marks=SWEEP),
    ],
)
def test_two_processes_with_tiers_give_the_tokens_of_one(name: str, axes: tuple[str, ...], tmp_path: Path) -> None:
    run(name, *axes, "--tiers", num_processes=2, folder=tmp_path)


@pytest.mark.sweep
def test_two_processes_find_what_two_before_them_left_on_disk(tmp_path: Path) -> None:
    for more in ((), ("--restarted",)):
        run("llama", "context=2", "--tiers", *more, num_processes=2, folder=tmp_path)


@pytest.mark.parametrize(
    ("deviation", "message"),
    [
        ("settings", "expected the same settings on all processes, got on process 1 max_num_seqs=5"),
        pytest.param("requests", "DivergenceError: processes planned other steps from step 1 on", marks=SWEEP),
    ],
)
def test_processes_that_disagree_stop(deviation: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run("llama", "tensor=2", "--deviation", deviation, num_processes=2)
