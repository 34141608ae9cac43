"""scripts/ itself holds what a user runs; what these share lies in folders. Each starts from any folder."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))
NEEDS = {"make_goldens.py": "torch", "mutate_core.py": "cosmic_ray", "train_demo.py": "optax"}


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_is_a_command(path: Path) -> None:
    assert any(is_main_guard(node) for node in ast.parse(path.read_text()).body), f"{path.name} is not to be run"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_says_how_it_is_called(path: Path, tmp_path: Path) -> None:
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, path, "--help"], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"usage: {path.name}" in result.stdout
