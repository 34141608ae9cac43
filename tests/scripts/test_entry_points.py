"""scripts/ itself holds what a user runs; what these share lies in folders. Each starts from any folder."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))
NEEDS = {
    "make_config_forms.py": "torch",
    "make_goldens.py": "torch",
    "make_quantised_goldens.py": "torch",
    "make_setting_goldens.py": "torch",
    "mutate.py": "cosmic_ray",
    "train_demo.py": "optax",
    "vllm_bench.py": "vllm",
    "vllm_lockstep.py": "vllm",
    "vllm_replay.py": "vllm",
}
PROGRAM = """
import contextlib, io, json, os, runpy, sys

path, printed = sys.path[1:], {}
for script in sys.argv[1:]:
    sys.path[:], sys.argv = [os.path.dirname(script), *path], [script, "--help"]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scripts", "tests")]:
        del sys.modules[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
            code = None
        except SystemExit as exit:
            code = exit.code
    printed[os.path.basename(script)] = code or 0, out.getvalue()
print(json.dumps(printed))
"""


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_is_a_command(path: Path) -> None:
    assert any(is_main_guard(node) for node in ast.parse(path.read_text()).body), f"{path.name} is not to be run"


def test_each_says_how_it_is_called(tmp_path: Path) -> None:
    """In one process that imports jax once; what one script puts on the path, and imports there, the next has not."""
    scripts = [
        path for path in SCRIPTS if path.name not in NEEDS or importlib.util.find_spec(NEEDS[path.name]) is not None
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, scripts)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    for path in scripts:
        code, output = printed[path.name]
        assert code == 0, path.name
        assert f"usage: {path.name}" in output
