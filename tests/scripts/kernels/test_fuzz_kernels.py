"""The script that tries kernels against float64 oracles: it passes, and finds a planted fault with what repeats it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from pallas_kernels.cases.find import case_types
from pallas_kernels.merge_states import reference
from scripts import fuzz_kernels

QUICK = ["--platform", "reference", "--trials", "1", "--seed", "1"]
TRIED = {("kv_write", "reference"), ("merge_states", "reference"), ("selective_scan", "reference")}  # others: sweeps


@pytest.mark.parametrize(
    ("op", "platform"),
    [
        pytest.param(op, platform, marks=() if (op, platform) in TRIED else pytest.mark.sweep)
        for op, case_type in case_types().items()
        for platform in case_type.backends
    ],
)
def test_a_trial_of_every_op(op: str, platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right, told by name, and as JSON."""
    assert (
        fuzz_kernels.main([*QUICK[2:], "--platform", platform, "--op", op, "--json", str(tmp_path / "results.json")])
        == 0
    )
    assert "seed 1" in capsys.readouterr().out
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["seed"] == 1
    (result,) = written["results"]
    assert (result["op"], result["platform"], result["trials"], result["failures"]) == (op, platform, 1, [])
    assert result["cases"] > 0


def test_the_same_seed_makes_the_same_cases() -> None:
    """A trial is a function of its op, platform, seed and number."""
    first, again = (list(fuzz_kernels.cases_of("merge_states", "reference", 5, 2)) for _ in range(2))
    assert first == again
    assert first != list(fuzz_kernels.cases_of("merge_states", "reference", 5, 3))


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the command that finds it again."""
    merge = reference.merge_states
    monkeypatch.setattr(reference, "merge_states", lambda *given: jax.tree.map(lambda x: x * 1.001, merge(*given)))
    assert fuzz_kernels.main([*QUICK, "--op", "merge_states", "--trials", "3"]) == 1
    printed = capsys.readouterr().out
    command = "--op merge_states --platform reference --seed 1 --first 0 --trials 1"
    assert f"WRONG: python scripts/fuzz_kernels.py {command}" in printed
    assert fuzz_kernels.main(command.split()) == 1
