"""The script that times the engine's host side: what its figures say, and that it runs."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest

from kvjax import engine
from scripts import bench_engine
from scripts.bench_engine import PartTimer
from tests.models.golden_models import model_folder


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_part_within_another_counts_once() -> None:
    timer = PartTimer()
    inner = timer.wrapped("inner", lambda: work(0.02))

    def outer() -> str:
        work(0.01)
        inner()
        return "done"

    start = time.thread_time()
    assert timer.wrapped("outer", outer)() == "done"
    whole = time.thread_time() - start
    spent = timer.take()
    assert spent["inner"] >= 0.02
    assert spent["outer"] >= 0.01
    assert spent["inner"] + spent["outer"] <= whole
    assert timer.take() == {}


def test_a_part_that_raises_is_timed_and_leaves_the_others_right() -> None:
    timer = PartTimer()

    def fails() -> None:
        work(0.01)
        raise KeyError

    with pytest.raises(KeyError):
        timer.wrapped("fails", fails)()
    timer.wrapped("after", lambda: work(0.01))()
    spent = timer.take()
    assert spent["fails"] >= 0.01
    assert spent["after"] >= 0.01


def test_sleep_is_no_part() -> None:
    """The engine's thread sleeps while the device computes."""
    timer = PartTimer()
    timer.wrapped("sleep", lambda: time.sleep(0.05))()
    assert timer.take()["sleep"] < 0.02


def test_a_step_is_timed_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model than the demo's, and one program."""
    monkeypatch.setattr(bench_engine, "DEMO", model_folder("llama"))
    monkeypatch.setattr(engine, "EngineConfig", functools.partial(engine.EngineConfig, max_buckets=1))
    out = tmp_path / "out.json"
    assert bench_engine.main(["step", "--requests", "2", "--steps", "2", "--json", str(out)]) == 0
    step = json.loads(out.read_text())["step"]
    assert {"schedule", "plan", "pad", "pack", "jit", "dispatch", "read", "update"} <= step["parts_us"].keys()
    assert 0 < step["least_us"] <= step["total_us"] <= step["wall_us"]
    assert step["parts_us"]["jit"] < step["other_cpu_us"]


@pytest.mark.parametrize("option", ["requests", "steps", "runs", "layers"])
def test_counts_are_at_least_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main([f"--{option}", "0"])
    assert f"expected --{option} of at least 1, got 0" in capsys.readouterr().err
