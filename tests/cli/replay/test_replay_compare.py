"""`kvjax replay --compare-defaults`: a table of models and memory sizes that says what single replays say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvjax.cli.main import main
from kvjax.replay import write_trace
from tests.cli.interrupting import interrupting_after
from tests.replay.random_traces import random_trace

MODELS = "gpt-oss-120b,llama-3-8b"
SIZES = "500MB,1GB"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_trace(random_trace(0, 20, max_output=4), tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def compare(trace: str, path: Path, *options: str) -> dict[tuple[str, int], dict[str, int]]:
    """Hit tokens by column, of each model and size."""
    arguments = ["replay", trace, "--compare-defaults", MODELS, "--memory-sizes", SIZES, "--json", str(path)]
    assert main([*arguments, *options]) == 0
    cells = json.loads(path.read_text())["cells"]
    return {(cell["model"], cell["memory_bytes"]): cell["hit_tokens"] for cell in cells}


def replay(trace: str, path: Path, model: str, memory_bytes: int, *options: str) -> dict[str, int]:
    where = ["--model", model, "--memory", str(memory_bytes), "--json", str(path)]
    assert main(["replay", trace, *where, *options]) == 0
    return json.loads(path.read_text())


def test_cells_are_single_replays(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = compare(trace, tmp_path / "table.json")
    assert len(cells) == 4
    for (model, memory_bytes), hits in cells.items():
        where = (trace, tmp_path / "one.json", model, memory_bytes)
        serial = replay(*where, "--serial", "--bound")
        assert hits == {
            "serial": serial["hit_tokens"],
            "batches": replay(*where)["hit_tokens"],
            "vLLM's rules": replay(*where, "--serial", "--rules", "vllm-0.33.0")["hit_tokens"],
            "free exchange": serial["bounds"]["free_exchange"],
            "unforgetting": serial["bounds"]["free_exchange_unforgetting"],
            "clairvoyant": serial["bounds"]["clairvoyant"],
            "infinite cache": serial["infinite_hit_tokens"],
        }
    capsys.readouterr()


def test_the_table_is_in_percent_of_all_prompt_tokens(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = compare(trace, tmp_path / "table.json")
    lines = capsys.readouterr().out.splitlines()
    total = sum(request.input_length for request in random_trace(0, 20, max_output=4))
    assert f"percent of {total:,} prompt tokens that were hit" in lines
    for (model, memory_bytes), hits in cells.items():
        row = next(
            line.split() for line in lines if line.startswith(f"{model}  ") and f" {memory_bytes / 1e9:g} GB" in line
        )
        assert row[3:10] == [f"{100 * tokens / total:.2f}" for tokens in hits.values()]
        assert row[10:] == [f"{hits['serial'] / hits['free exchange']:.1%}", f"{hits['batches'] / hits['serial']:.1%}"]


def test_options_that_are_given_count(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = compare(trace, tmp_path / "table.json", "--serial", "--rules", "vllm-0.33.0")
    assert all(hits["serial"] == hits["vLLM's rules"] for hits in cells.values())
    assert cells != compare(trace, tmp_path / "table.json", "--serial")
    capsys.readouterr()


def test_what_the_file_has_is_not_run_again(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless settings differ, here the requests that are read."""
    path = tmp_path / "table.json"
    first = compare(trace, path, "--serial")
    assert all("batches" not in hits for hits in first.values())
    data = json.loads(path.read_text())
    data["cells"][0]["hit_tokens"]["serial"] = 7
    path.write_text(json.dumps(data))
    again = compare(trace, path)
    key = ("gpt-oss-120b", 500_000_000)
    assert again[key]["serial"] == 7
    assert {name: hits for name, hits in again[key].items() if name != "batches"} == first[key] | {"serial": 7}
    assert compare(trace, path, "--num-requests", "12")[key]["serial"] < first[key]["serial"]
    capsys.readouterr()


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}"])
def test_another_file_is_written_over(
    text: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert len(compare(trace, path, "--serial")) == 4
    capsys.readouterr()


def test_the_columns_of_the_plot_alone(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of the whole table, which adds the others to them."""
    path = tmp_path / "table.json"
    drawn = compare(trace, path, "--plot-only")
    assert all(list(hits) == ["batches", "infinite cache"] for hits in drawn.values())
    assert all("batches" not in hits for hits in compare(trace, tmp_path / "one", "--plot-only", "--serial").values())
    whole = compare(trace, path)
    assert all(hits.items() <= whole[key].items() for key, hits in drawn.items())
    assert all(len(hits) == 7 for hits in whole.values())
    capsys.readouterr()


def test_an_interrupt_keeps_what_is_done(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    arguments = ["replay", trace, "--compare-defaults", MODELS, "--memory-sizes", SIZES, "--json", str(path)]
    with monkeypatch.context() as context:
        context.setattr("kvjax.cli.replay.compare.progress", interrupting_after(30, "Comparing"))
        assert main([*arguments, "--beside", "none is called"]) == 130
    assert "prompt tokens that were hit" in capsys.readouterr().out
    cells = json.loads(path.read_text())["cells"]
    assert [sorted(cell["hit_tokens"]) for cell in cells] == [["serial"], [], [], []]
    assert compare(trace, path) == compare(trace, tmp_path / "other.json")
    capsys.readouterr()


def test_a_memory_that_holds_no_request_says_so(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = compare(trace, tmp_path / "table.json", "--memory-sizes", "1MB,1GB", "--serial")
    assert cells["llama-3-8b", 1_000_000] == {}
    assert cells["llama-3-8b", 1_000_000_000]
    out = capsys.readouterr().out
    assert "llama-3-8b, 1,000,000 bytes: the cache of one request of the planned length needs" in out
    assert "llama-3-8b    0.001 GB       -" in out


def test_a_command_beside_gets_the_trace_and_gives_columns(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says one hit token more for each request and each byte of memory."""
    script = tmp_path / "beside.py"
    script.write_text(
        """
import json, sys
trace, _, models, _, sizes, _, path = sys.argv[1:]
requests = [json.loads(line) for line in open(trace)]
rows = [
    {"name": "other", "model": model, "memory_bytes": int(size), "hit_tokens": len(requests) + int(size)}
    for model in models.split(",") if model != "llama-3-8b" for size in sizes.split(",")
]
json.dump({"rows": rows}, open(path, "w"))
"""
    )
    cells = compare(trace, tmp_path / "table.json", "--serial", "--beside", f"{sys.executable} {script}")
    others = {key: hits["other"] for key, hits in cells.items() if "other" in hits}
    assert others == {("gpt-oss-120b", size): size + 20 for size in (500_000_000, 1_000_000_000)}
    assert re.search(r"infinite cache +other +serial / free exchange", capsys.readouterr().out)
    script.write_text("raise SystemExit(3)")
    arguments = ["replay", trace, "--compare-defaults", MODELS, "--memory-sizes", "1GB", "--serial"]
    assert main([*arguments, "--beside", f"{sys.executable} {script}"]) == 2
    assert "beside.py' to replay, got exit status 3" in capsys.readouterr().err


def test_users_at_once_are_those_of_single_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More sessions between two turns of one push its blocks out; the plot has a line per model and size."""
    sessions = [
        {
            "block_size": 64,
            "requests": [
                {"t": 9.0 * i, "in": 640 * (i + 1), "out": 9, "think": 5.0, "api": 1.0, "runs": [[1, 10 * (i + 1)]]}
                for i in range(4)
            ],
        }
        for _ in range(6)
    ]
    trace, path = tmp_path / "agents.jsonl", tmp_path / "table.json"
    trace.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    arguments = ["replay", str(trace), "--compare-defaults", "llama-3-8b", "--memory-sizes", "600MB"]
    plot = ["--plot", str(tmp_path / "users.svg"), "--json", str(path)]
    assert main([*arguments, "--user-counts", "1,6", *plot]) == 0
    assert re.search(r"model +memory +users +serial", capsys.readouterr().out)
    assert "How much of the prompts is found in the cache, by users at once" in (tmp_path / "users.svg").read_text()
    cells = {cell["users"]: cell for cell in json.loads(path.read_text())["cells"]}
    assert list(cells) == [1, 6]
    for users, cell in cells.items():
        single = replay(str(trace), tmp_path / "one.json", "llama-3-8b", 600_000_000, "--users", str(users))
        assert cell["hit_tokens"]["batches"] == single["hit_tokens"]
        assert cell["hit_tokens"]["infinite cache"] == single["infinite_hit_tokens"]
        assert cell["prompt_tokens"] == single["prompt_tokens"]
    assert cells[6]["hit_tokens"]["batches"] < cells[1]["hit_tokens"]["batches"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--compare-defaults a --num-blocks 9", "expected --num-blocks without --compare-defaults, got both"),
        ("--compare-defaults a --host-memory 1GB", "expected --host-memory without --compare-defaults, got both"),
        ("--compare-defaults a --memory 1GB", "expected --memory without --compare-defaults"),
        ("--compare-defaults a --bound", "expected --bound without --compare-defaults"),
        ("--compare-defaults a --replicas 2", "expected --compare-defaults for one replica"),
        ("--memory-sizes 1GB", "expected --compare-defaults with --memory-sizes, got it alone"),
        ("--beside x", "expected --compare-defaults with --beside, got it alone"),
        ("--user-counts 2,4", "expected --compare-defaults with --user-counts, got it alone"),
        (
            "--compare-defaults llama-3-8b --user-counts 2 --users 4",
            "expected --users N or --user-counts N,N, got both",
        ),
        ("--compare-defaults llama-3-8b --user-counts 2", "expected no users for request lines (Mooncake"),
        ("--compare-defaults no-model", "expected a model's name"),
    ],
)
def test_options_that_contradict_one_another(
    options: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *options.split()]) == 2
    assert message in capsys.readouterr().err
