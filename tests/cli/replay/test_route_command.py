"""`kvjax route` as a person and as a program run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli.main import main
from kvjax.replay import write_trace
from tests.replay.test_fleet import conversations

ARGUMENTS = ("--num-blocks", "2000", "--replicas", "2", "--no-progress")


def test_routers_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_trace(conversations(5, 3), tmp_path / "trace.jsonl")
    assert main(["route", str(tmp_path / "trace.jsonl"), *ARGUMENTS, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    values = {one["router"]: one for one in json.loads((tmp_path / "out.json").read_text())}
    assert list(values) == ["round_robin", "least_loaded", "prefix"]
    assert all(name in out for name in values)
    assert values["prefix"]["token_hit_rate"] == values["prefix"]["infinite_token_hit_rate"] > 0.4
    assert values["round_robin"]["token_hit_rate"] < values["prefix"]["token_hit_rate"]
    assert f"{values['prefix']['token_hit_rate']:.2%}" in out
    assert sum(values["prefix"]["requests_by_replica"]) == 15


def test_one_router_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--generate", "chat", "--num-requests", "5", "--router", "prefix", *ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert "prefix  " in out
    assert "round_robin" not in out


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *ARGUMENTS]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["route", "--generate", "chat", "--num-requests", "5", "--policy", "belady", *ARGUMENTS]) == 2
    assert "expected continuous batching under lru, slru or cost" in capsys.readouterr().err
