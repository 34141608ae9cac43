"""scripts/mutate.py on a package of one module, whose tests kill some changes, hang on one and miss another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cosmic_ray")

from scripts.mutate import main, mutants

MODULE = """
def added(a: int | None, b: int) -> int | None:
    if not a:
        raise ValueError(f"expected {1 + 0}")
    return a + b


def drained(n, step):
    while n:
        n = n - step
    return n


def untested(a, b):
    return a * b
"""
TESTS = "from toy import *\n\n\ndef test_toy():\n    assert added(1, 2) == 3\n    assert drained(4, 2) == 0\n"
OUTCOMES = {3: "killed", 5: "killed", 9: "killed", 10: "timeout", 15: "survived"}  # by line


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "tests").mkdir(parents=True)
    (tmp_path / "root" / "toy.py").write_text(MODULE)
    (tmp_path / "root" / "tests" / "test_toy.py").write_text(TESTS)
    return tmp_path / "root"


def run(root: Path, *options: str) -> list[dict[str, Any]]:
    results = root.parent / "results.jsonl"
    main(["--of", "toy.py", "--tests", "tests", "--results", str(results), "--timeout", "8", *options], root)
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_each_mutant_runs_once_and_survivors_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(root, "--count", "2")
    rows = run(root, "--jobs", "2")
    assert rows[:2] == first
    assert {row["line"]: row["outcome"] for row in rows} == OUTCOMES
    assert len({row["diff"] for row in rows}) == len(rows)
    assert "-    return a * b\n+    return a // b\n" in capsys.readouterr().out
    assert [row["line"] for row in run(root, "--again")[len(rows) :]] == [15]
    assert (root / "toy.py").read_text() == MODULE


def test_a_seed_draws_the_same_mutants(root: Path) -> None:
    draws = [[mutant["diff"] for mutant, _ in mutants(root, ["."], seed)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_tests_that_fail_without_a_change_are_refused(root: Path) -> None:
    (root / "toy.py").write_text(MODULE.replace("a + b", "a - b"))
    with pytest.raises(SystemExit, match="expected tests that pass before any change"):
        run(root)
