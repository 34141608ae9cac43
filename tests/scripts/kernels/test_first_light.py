"""scripts/first_light: rows in their processes, budgets, going on, the report; a row of each stage as a dry run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from pallas_kernels.cases.find import case_types
from scripts.first_light import __main__ as command
from scripts.first_light import report, runner
from scripts.first_light.headlines import HEADLINES, headline
from scripts.first_light.journal import Journal, Record
from scripts.first_light.programs import facts, smoke
from scripts.first_light.runner import Row, Stage
from scripts.first_light.stages import stages


def row(name: str, program: str, limit_s: float = 60.0) -> Row:
    return Row(name, (sys.executable, "-c", program), limit_s)


def run(stage: Iterable[Row], path: Path, budget_s: float = 600.0, **options: bool) -> tuple[runner.Summary, Journal]:
    journal = Journal(path)
    said: list[str] = []
    return runner.run([Stage("a", 1, tuple(stage))], journal, budget_s, say=said.append, **options), journal


def test_a_row_is_its_last_line_of_json(tmp_path: Path) -> None:
    summary, journal = run(
        [row("x", "print('{\"a\": 1}'); print('{\"a\": 2}'); print('{no'); print('end')")], tmp_path / "j"
    )
    assert summary == runner.Summary(done=1)
    assert journal.records["x"].result == {"a": 2}
    assert journal.records["x"].tail == ""


def test_a_crash_and_a_hang_lose_one_row_each(tmp_path: Path) -> None:
    """The next rows run; children of a row that is over time end with it."""
    crash = "import os, signal; print('about to', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    summary, journal = run([row("crash", crash), row("hang", child, 1.0), row("good", "print('{}')")], tmp_path / "j")
    assert summary == runner.Summary(done=1, failed=2)
    assert [record.state for record in journal.records.values()] == ["failed", "timeout", "done"]
    assert journal.records["crash"].tail == "about to"
    assert journal.records["hang"].seconds < 30


def test_rows_that_ended_do_not_run_again(tmp_path: Path) -> None:
    path, count = tmp_path / "j", tmp_path / "count"
    program = f"open({str(count)!r}, 'a').write('x'); raise SystemExit(3)"
    rows = [row("bad", program)]
    run(rows, path)
    assert run(rows, path)[0] == runner.Summary()
    assert count.read_text() == "x"
    assert run(rows, path, retry=True)[0] == runner.Summary(failed=1)
    assert count.read_text() == "xx"


def test_a_killed_run_goes_on_and_loses_one_row(tmp_path: Path) -> None:
    """The row that was under way runs again, last; what ended before stands, and a torn line is left out."""
    path, order = tmp_path / "j", tmp_path / "order"
    journal = Journal(path)
    journal.start("first", "a")
    journal.end(Record("first", "a", "done", 1.0, {"kept": True}))
    journal.start("lost", "a")
    with path.open("a") as file:
        file.write('{"row": "lost", "sta')
    write = "open({!r}, 'a').write({!r})"
    rows = [row(name, write.format(str(order), f"{name} ")) for name in ("first", "lost", "last")]
    summary, journal = run(rows, path)
    assert summary == runner.Summary(done=2)
    assert order.read_text() == "last lost "
    assert journal.records["first"].result == {"kept": True}
    assert Journal(path).records == journal.records


def test_a_budget_leaves_rows_for_the_next_run(tmp_path: Path) -> None:
    """Time that a stage does not use is the next one's; a row that cannot begin leaves no line."""
    path = tmp_path / "j"
    rows = [row("x", "pass")]
    assert run(rows, path, budget_s=runner.LEAST_SECONDS / 2)[0] == runner.Summary(skipped=1)
    assert not path.exists()
    journal = Journal(path)
    both = [Stage("a", 9, ()), Stage("b", 1, tuple(rows))]
    assert runner.run(both, journal, 20.0, say=lambda _: None) == runner.Summary(done=1)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"state": "done", "x": 1}\n')
    with pytest.raises(ValueError, match="expected events of first_light"):
        Journal(path)


def test_every_stage_has_rows_and_every_name_is_one_row(tmp_path: Path) -> None:
    for card in (None, "h100"):
        found = stages(tmp_path, card)
        assert [stage.name for stage in found] == list(command.NAMES)
        names = [row.name for stage in found for row in stage.rows]
        assert len(set(names)) == len(names)
        assert {f"smoke {op}" for op in case_types()} <= set(names)
        assert sum(stage.minutes for stage in found) == 38


def test_headlines_are_cases_of_the_benchmark() -> None:
    assert {one.bench_case.case.op for one in HEADLINES} <= set(case_types())
    assert headline("decode 64 x 4k, page 64").bench_case.name.endswith("/64x4096/page 64/bfloat16")
    with pytest.raises(ValueError, match="expected a case out of"):
        headline("decode")


def result(op_us: float) -> dict[str, object]:
    return {"op_us": op_us, "num_bytes": 1_000_000, "flops": 0, "kernel_us": op_us / 2, "launches": 3.0, "words": "op"}


def test_the_table_has_shares_of_the_peaks_of_the_same_run_and_says_what_misses(tmp_path: Path) -> None:
    """1 MB in 1 us is 1 TB/s; the copy did 1.1."""
    good, bad = HEADLINES[0].name, HEADLINES[1].name
    records = {
        "facts": Record("facts", "facts", "done", 1, {"words": "a card"}),
        "peaks": Record("peaks", "facts", "done", 1, {"bytes_per_s": 1.1e12, "flops_per_s": 1e15, "source": "a copy"}),
        f"time: {good}": Record(f"time: {good}", "headlines", "done", 1, result(1.0)),
        f"torch sdpa: {good}": Record(f"torch sdpa: {good}", "rivals", "done", 1, result(2.0)),
        f"time: {bad}": Record(f"time: {bad}", "headlines", "done", 1, result(2.0)),
        "right: x": Record("right: x", "tests", "failed", 1, {}, "an\nerror"),
    }
    text = report.markdown(records)
    assert f"| {good} | 1.0 | 0.5 | 3.0 | 91% | 0 | 80%: holds | torch sdpa 2 |" in text
    assert f"| {bad} | 2.0 | 1.0 | 3.0 | 45% | 0 | 80%: missed |  |" in text
    assert "6 rows, 1 failed:\n\n- right: x: failed, error" in text
    assert [(row.name, row.by, row.median_us) for row in report.roofline_rows(records)] == [
        (good, "kvjax", 1.0),
        (good, "torch sdpa", 2.0),
        (bad, "kvjax", 2.0),
    ]


def test_a_dry_run_of_a_row_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows: scripts/first_light_gpu.sh --dry-run."""
    pattern = "*[!0-9]v_write"  # smoke kv_write
    assert command.main(["--dry-run", "--out", str(tmp_path), "--row", pattern]) == 0
    case = HEADLINES[0].name
    for name in (
        "facts",
        "peaks",
        f"right: {case}",
        f"time: {case}",
        "torch sdpa: decode 1 x 128k",
        "tune llama3-8b, page 16",
    ):
        assert command.main(["--dry-run", "--out", str(tmp_path), "--row", name.replace("[", "[[]")]) == 0
    events = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [event["state"] for event in events] == ["started", "done"] * 7
    assert "7 rows, 0 failed." in (tmp_path / "table.md").read_text()
    assert "1 done, 0 failed" in capsys.readouterr().out


def test_a_smoke_row_runs_what_other_cards_run_too() -> None:
    """By the kernel in Triton, and where there is one by that for Hopper."""
    in_triton, on_hopper = smoke.found_of("compressor_update", is_dry=True).values()
    assert isinstance(in_triton, float)
    assert in_triton <= 1
    assert "there is no gpu kernel" in str(on_hopper)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run", "--budget", "0"], "expected --budget of more than 0 minutes"),
        (["--dry-run", "--row", "nothing"], "expected rows that match 'nothing'"),
        (["--dry-run", "--stage", "lunch"], "invalid choice: 'lunch'"),
    ],
)
def test_what_cannot_run_is_said_before_anything_runs(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--out", str(tmp_path / "out")])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_card_only_a_dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "card_here", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        command.main([])
    assert "expected an NVIDIA GPU that jax sees, got none; --dry-run" in capsys.readouterr().err


def test_the_drivers_answers_are_named_by_the_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA H100, 580.1, 81559 MiB, 5, 345 MHz, 1980 MHz, 2619 MHz, 2619 MHz, 700.00 W'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.nvidia_smi()["driver_version"] == "580.1"
    assert facts.nvidia_smi()["clocks.max.sm"] == "1980 MHz"
    smi.write_text("#!/bin/sh\necho 'no devices'; exit 6\n")
    assert facts.nvidia_smi() == {"error": "no devices"}
    smi.unlink()
    assert facts.nvidia_smi() == {}
