"""The script that times the engine's host side: what its figures say, and that it runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from kvjax import engine
from scripts import bench_engine
from tests.models.golden_models import model_folder


def test_a_step_is_timed_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model than the demo's, and one program."""
    monkeypatch.setattr(bench_engine, "DEMO", model_folder("llama"))
    monkeypatch.setattr(engine, "EngineConfig", functools.partial(engine.EngineConfig, max_buckets=1))
    monkeypatch.setattr(bench_engine, "check_asynchronous", lambda: None)  # a busy machine may fail it
    out = tmp_path / "out.json"
    assert bench_engine.main(["step", "--requests", "2", "--steps", "2", "--json", str(out)]) == 0
    step = json.loads(out.read_text())["step"]
    assert {"schedule", "plan", "pad", "pack", "jit", "dispatch", "read", "malloc", "update"} <= step["parts_us"].keys()
    assert 0 < step["least_us"] <= step["total_us"] <= step["wall_us"]
    assert step["other_cpu_us"] > 0


@pytest.mark.parametrize("option", ["requests", "steps", "runs", "layers"])
def test_counts_are_at_least_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main([f"--{option}", "0"])
    assert f"expected --{option} of at least 1, got 0" in capsys.readouterr().err
