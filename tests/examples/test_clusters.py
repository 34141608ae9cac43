"""Programs that start processes on clusters: those that can run here do, the others at least read as what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert all(f"examples/clusters/{path.name}" in page for path in CLUSTERS.iterdir() if path.is_file())


def test_the_programs_read() -> None:
    for path in CLUSTERS.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
    for path in CLUSTERS.glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("name", ["jobset", "leader_worker_set"])
def test_pods_tell_processes_who_they_are(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = (CLUSTERS / f"{name}.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["kind"].lower() == name.replace("_", "")
    for variable in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        assert f"{variable}=" in text


@pytest.mark.sweep
def test_requests_of_a_file_are_answered(tmp_path: Path) -> None:
    """A second start has nothing to do but what is new."""
    requests = [{"id": str(i), "prompt_token_ids": [1, 2, 3 + i], "max_tokens": 4} for i in range(6)]
    program = [sys.executable, str(CLUSTERS / "serve.py"), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "kvjax", "launch", "-n", "2", "--cpu-devices", "1", "--restarts", "0"]
    for count in (4, 6):
        lines = [f"{json.dumps(request)}\n" for request in requests[:count]]
        (tmp_path / "requests.jsonl").write_text("".join(lines))
        done = subprocess.run(
            [*command, "--", *program], capture_output=True, text=True, timeout=250, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        assert sorted(one["id"] for one in answers) == [str(i) for i in range(count)]
        assert all(len(one["token_ids"]) == 4 for one in answers)
