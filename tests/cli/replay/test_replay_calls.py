"""`kvjax replay --record` writes what `kvjax replay --calls` makes again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli.main import main
from tests.cli.interrupting import interrupting_after

WORKLOAD = ("--generate", "agents", "--num-requests", "12", "--model", "gemma-3-27b", "--num-blocks", "20000")


@pytest.mark.parametrize("mode", [(), ("--serial",)])
def test_a_recorded_replay_is_made_again(mode: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record, plain, recorded = (tmp_path / name for name in ("calls", "plain.json", "recorded.json"))
    assert main(["replay", *WORKLOAD, *mode, "--json", str(plain)]) == 0
    assert main(["replay", *WORKLOAD, *mode, "--json", str(recorded), "--record", str(record)]) == 0
    results = [json.loads(path.read_text()) for path in (plain, recorded)]
    assert results[0]["hit_tokens"] == results[1]["hit_tokens"] > 0
    assert results[0]["steps"] == results[1]["steps"]
    capsys.readouterr()
    assert main(["replay", "--calls", str(record)]) == 0
    out = capsys.readouterr().out
    assert "every answer as recorded" in out
    assert "12 free, " in out
    assert "0 running requests" in out


def test_interrupted_calls_are_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "calls"
    assert main(["replay", *WORKLOAD, "--record", str(record)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("kvjax.cli.replay.calls.progress", interrupting_after(7))
    assert main(["replay", "--calls", str(record)]) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvjax: interrupted\n"
    assert captured.out.startswith("interrupted; until then:\n7 calls in ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--calls", "FOREIGN"), "expected a file of recorded calls, got another"),
        (("--calls", "missing"), "expected a file that exists, got 'missing'"),
        (("--calls", "FOREIGN", "--generate", "chat"), "expected --calls without a TRACE or --generate, got both"),
        (("trace.jsonl", "--calls", "FOREIGN"), "expected --calls without a TRACE or --generate, got both"),
    ],
)
def test_bad_input_is_one_clear_line(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("{}\n")
    assert main(["replay", *(str(foreign) if word == "FOREIGN" else word for word in argv)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
