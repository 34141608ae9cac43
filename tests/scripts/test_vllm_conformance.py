"""scripts/vllm_conformance.sh finds a Python that vLLM's releases run on, or says at once that there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_conformance.sh"


def run(tmp_path: Path, python: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KVJAX_VLLM_DIR": str(tmp_path / "vllm"), "PYTHON": str(python)}
    command = ["bash", str(SCRIPT), "0.33.0", "--setup-only"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("answers", ["echo False", "exit 1", "true"])
def test_another_python_is_refused_before_anything_is_installed(answers: str, tmp_path: Path) -> None:
    """Python 3.11 has wheels of torch without those of torchvision that fit."""
    python = tmp_path / "python3.11"
    python.write_text(f"#!/bin/sh\n{answers}\n")
    python.chmod(0o755)
    done = run(tmp_path, python)
    assert done.returncode == 1
    assert done.stderr == (f"vllm_conformance.sh: expected Python 3.12 or 3.13, got {python}; name one with PYTHON=\n")
    assert not (tmp_path / "vllm" / "0.33.0" / "venv").exists()


def test_one_that_fits_makes_the_environment(tmp_path: Path) -> None:
    """As far as the first command that needs it."""
    python = tmp_path / "python3.12"
    python.write_text('#!/bin/sh\ncase "$1" in -c) echo True ;; *) echo "made $*" >&2; exit 7 ;; esac\n')
    python.chmod(0o755)
    done = run(tmp_path, python)
    assert done.returncode == 7
    assert done.stderr == f"made -m venv {tmp_path}/vllm/0.33.0/venv\n"
