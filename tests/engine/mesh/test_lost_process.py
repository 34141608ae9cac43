"""A mesh of 2 x 4 loses a process: the other names it and ends, and a second start answers what is owed."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.mesh.front_program import NUM_TOKENS, requests_of
from tests.models.golden_models import goldens_of

SWEEP = pytest.mark.sweep
ROOT = Path(__file__).parents[3]
MOST_S = 5.0  # from a death to the end of the other
AXES = ("data=2", "context=2", "tensor=2")
RUNNER, CORE = "kvjax.engine.step.model_runner:ModelRunner", "kvjax.engine.step.engine_core:EngineCore"
FRONT = "kvjax.engine.front.process_front:ProcessFront"
POINTS = {
    "before it compiles": (1, f"{FRONT}.serve", 1),
    "as requests are submitted": (0, f"{FRONT}.submit", 4),
    "as requests are admitted": (0, "kvjax.engine.front.llm_engine:LLMEngine.take_up", 3),
    "in a prefill": (1, f"{RUNNER}.dispatch", 2),
    "in a decode": (0, f"{RUNNER}.read", 25),
    "between steps": (1, f"{CORE}.step", 30),
    "between steps of process 0": (0, f"{CORE}.step", 40),
    "in a comparison": (1, "kvjax.engine.step.agreement:Agreement._compare", 2),
    "in a comparison of process 0": (0, "kvjax.engine.step.agreement:Agreement._compare", 3),
    "as a tier is written": (1, "kvjax.tiers.worker.tier_worker:TierWorker.start_load_kv", 12),
    "as an answer is given": (0, f"{FRONT}._answer", 2),
    "after an answer": (0, "kvjax.engine.front.owed_journal:OwedJournal.end", 6),
}
QUICK = ("in a decode",)


def launch(folder: Path, *arguments: str, restarts: int = 1) -> str:
    """Stderr of the processes and of their launcher."""
    program = [sys.executable, "-m", "tests.engine.mesh.front_program", str(folder), *AXES, *arguments]
    command = [sys.executable, "-m", "kvjax", "launch", "-n", "2", "--cpu-devices", "4", "--restarts", str(restarts)]
    done = subprocess.run(
        [*command, "--", *program], capture_output=True, text=True, timeout=290, cwd=ROOT, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def answers_in(folder: Path) -> dict[str, list[int]]:
    """Tokens by request; one that was answered twice has the same both times."""
    found: dict[str, list[int]] = {}
    for line in (folder / "answers.jsonl").read_text().splitlines():
        name, tokens, num_logprobs = json.loads(line)
        assert found.setdefault(name, tokens) == tokens
        assert num_logprobs == len(tokens)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(folder)
    return answers_in(folder)


def check_loss(point: str, folder: Path) -> dict[str, list[int]]:
    """What is answered in the end."""
    victim, place, count = POINTS[point]
    errors = launch(folder, "--die", str(victim), place, str(count))
    survivor = 1 - victim
    assert f"[{survivor}] kvjax: process {victim} of 2 is lost: " in errors
    assert f"are in {folder}/owed-{survivor}.jsonl; process {survivor} ends with status 75" in errors
    ended = re.search(r"process (\d) was ended by SIGKILL; the others ended within (.*) s; all start again", errors)
    assert ended is not None, errors[-3000:]
    assert int(ended[1]) == victim
    assert float(ended[2]) < MOST_S
    for path in folder.glob("owed-*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = answers_in(folder)
    for i, golden in enumerate(goldens_of("llama")):
        assert found[f"greedy-{i}"] == golden.greedy[:NUM_TOKENS].tolist()
    assert len(found) == sum(params.n for _, params in requests_of().values())
    return found


@pytest.mark.parametrize("point", QUICK)
def test_a_second_start_answers_what_is_owed(point: str, tmp_path: Path) -> None:
    check_loss(point, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("point", POINTS)
def test_all_tokens_are_those_of_an_undisturbed_run(
    point: str, tmp_path: Path, undisturbed: dict[str, list[int]]
) -> None:
    assert check_loss(point, tmp_path) == undisturbed


@pytest.mark.sweep
def test_tasks_of_one_process_read_what_both_compute(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.engine.mesh.async_front_program", str(tmp_path)]
    command = [sys.executable, "-m", "kvjax", "launch", "-n", "2", "--cpu-devices", "1", "--restarts", "0", "--"]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[0] all read\n" in done.stdout
