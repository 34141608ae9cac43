"""`kvjax bench` as a person and as a program run it, at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli.main import main
from tests.bench.test_hugging_face import ANSWERS, interpreter
from tests.cli.interrupting import interrupting_after
from tests.models.golden_models import model_folder

SMALL = [
    "--batch",
    "2",
    "--prompt-len",
    "24",
    "--new-tokens",
    "4",
    "--max-num-batched-tokens",
    "32",
    "--runs",
    "2",
    "--shared-len",
    "16",
]


def test_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Next to a fake of Hugging Face; once more, when every program comes from the compilation cache."""
    path, model = tmp_path / "out.json", str(model_folder("qwen3"))
    argv = ["bench", "--model", model, *SMALL, "--hf-python", interpreter(tmp_path, ANSWERS)]
    argv += ["--hf-compiled", "--json", str(path)]
    assert main(argv) == 0
    captured, data = capsys.readouterr(), json.loads(path.read_text())
    assert captured.err == ""
    assert f"Model   {model}: Qwen3ForCausalLM" in captured.out
    assert (
        "2 requests of 24 prompt and 4 new tokens; steps of at most 32 tokens, one at a time, 1 device" in captured.out
    )
    for name in ("Hugging Face generate", "HF compiled, static cache"):
        assert f"({name}: torch 0, transformers 0; the same tokens for 0 of 2 prompts)" in captured.out
        assert data["hugging_face"][name]["equal_rows"] == 0
    assert data["floor"]["decode"]["tokens_per_s"] > 0
    assert data["config"]["max_num_seqs"] == 2
    assert len(data["runs"]) == data["workload"]["num_runs"] == 2
    for run in (data, *data["runs"]):
        assert run["speeds"]["prefill"]["tokens"] == 2 * 24
        assert run["speeds"]["total"]["tokens"] == 2 * 28
        for speed in run["speeds"].values():
            assert speed["tokens_per_s"] * speed["wall_s"] == pytest.approx(speed["tokens"])
    wall_us = data["step"]["wall_us"]
    assert f"{sum(wall_us.values()):,.0f}" in captured.out
    assert (data["sharing"]["hit_tokens"], data["sharing"]["queried_tokens"]) == (16, 48)
    assert data["sharing"]["hit_rate"] == 16 / 48
    assert data["warmup"]["num_programs"] >= data["warmup"]["num_shapes"] > 0
    assert main(argv) == 0
    again = json.loads(path.read_text())["warmup"]
    assert again["num_cached"] == again["num_programs"] > 0
    assert f"{again['num_cached']:,} of them from the compilation cache." in capsys.readouterr().out


def test_drafts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    argv = ["bench", "--model", str(model_folder("qwen3")), *SMALL, "--new-tokens", "16", "--no-hugging-face"]
    assert main([*argv, "--speculative", "prompt-lookup", "--num-drafts", "2", "--json", str(path)]) == 0
    out, data = capsys.readouterr().out, json.loads(path.read_text())
    assert "Drafts  at most 2 a request and step, by prompt lookup" in out
    drafts = data["speculation"]
    assert 0 < drafts["accepted_tokens"] <= drafts["draft_tokens"]
    assert f"Speculation: {drafts['accepted_tokens']} of {drafts['draft_tokens']} drafts were accepted" in out
    assert data["speeds"]["total"]["tokens"] == 2 * (24 + 16)


def test_an_interrupt_leaves_the_runs_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    argv = ["bench", "--model", str(model_folder("qwen3")), *SMALL, "--no-hugging-face", "--json", str(path)]
    monkeypatch.setattr("kvjax.cli.commands.bench.progress", interrupting_after(2, "Measuring"))
    assert main(argv) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvjax: interrupted\n"
    assert "interrupted after 1 of 2 runs" in captured.out
    assert len(json.loads(path.read_text())["runs"]) == 1
    monkeypatch.setattr("kvjax.cli.commands.bench.progress", interrupting_after(0, "Measuring"))
    assert main(argv) == 130
    assert capsys.readouterr().out.endswith("interrupted after 0 of 2 runs\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "1"], "expected --new-tokens of at least 2, got 1"),
        (["--shared-len", "24"], "expected --shared-len below the 24 of --prompt-len, got 24"),
        (["--prompt-len", "40000"], "max_model_len"),
        (["--num-drafts", "2"], "expected --speculative with --num-drafts 2, got none"),
        (["--num-blocks", "2"], "needs 3 blocks of pool 0"),
        (["--model", "/no/such/folder"], "config.json"),
        (["--devices", "64"], "devices"),
        (["--hf-python", "/no/such/python"], "expected a file that exists, got '/no/such/python'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", str(model_folder("qwen3")), *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax bench: error: ")
    assert message in error
    assert error.count("\n") == 1
