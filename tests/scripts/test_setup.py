"""scripts/setup.sh refuses a mistyped extra before it makes or installs anything."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "setup.sh"


@pytest.mark.parametrize("extra", ["dmeo", "kvjax", "-e"])
def test_unknown_extras_are_refused(extra: str, tmp_path: Path) -> None:
    environment = os.environ | {"KVJAX_VENV": str(tmp_path / "venv")}
    result = subprocess.run([SCRIPT, "test", extra], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    known = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert result.stderr == f"kvjax: expected extras out of {known}, got '{extra}'\n"
    assert not (tmp_path / "venv").exists()
