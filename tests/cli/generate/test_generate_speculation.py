"""`kvjax generate --speculative`: what it says of its drafts, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvjax.cli.main import main
from tests.models.golden_models import model_folder

SMALL = [
    "--num-blocks",
    "200",
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "32",
    "--max-tokens",
    "24",
    "--max-model-len",
    "288",
]


def run(path: Path, *arguments: str) -> dict[str, Any]:
    assert main(["generate", *SMALL, "-q", "--json", str(path), *arguments]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.parametrize("asynchronous", [(), pytest.param(("--async",), marks=pytest.mark.sweep)])
def test_prompt_lookup_says_which_drafts_were_accepted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, asynchronous: tuple[str, ...]
) -> None:
    drafted = run(tmp_path / "drafted.json", "--speculative", "prompt-lookup", "--num-drafts", "3", *asynchronous)
    out = capsys.readouterr().out
    totals = drafted["totals"]
    assert drafted["config"]["speculative"]["num_drafts"] == 3
    assert 0 < totals["accepted_tokens"] <= totals["draft_tokens"]
    assert totals["accepted_tokens"] == sum(step["num_accepted_tokens"] for step in drafted["steps"])
    assert totals["tokens_per_decode_step"] > 1
    assert "Drafts  at most 3 a request and step, by prompt lookup" in out
    assert f"{totals['accepted_tokens']:,} of {totals['draft_tokens']:,} drafts were accepted" in out


@pytest.mark.sweep
def test_a_model_accepts_all_that_it_drafts_for_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, prompts = str(model_folder("llama")), tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [5, 9, 3, 7, 2] * 4}))
    options = ["--speculative", "draft-model", "--draft-model", folder]
    drafted = run(tmp_path / "drafted.json", "--model", folder, "--prompts", str(prompts), *options)
    plain = run(tmp_path / "plain.json", "--model", folder, "--prompts", str(prompts))
    ids = [[one["output_token_ids"] for one in report["requests"]] for report in (drafted, plain)]
    assert ids[0] == ids[1]
    assert drafted["totals"]["accepted_tokens"] == drafted["totals"]["draft_tokens"] > 12
    assert f"by {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-drafts", "3"], "expected --speculative with --num-drafts 3, got none"),
        (["--draft-model", "x"], "expected --speculative draft-model with --draft-model, got none"),
        (
            ["--draft-model", "x", "--speculative", "prompt-lookup"],
            "expected --speculative draft-model with --draft-model, got prompt-lookup",
        ),
        (["--speculative", "draft-model"], "expected --draft-model DIR with --speculative draft-model, got none"),
        (
            ["--speculative", "draft-model", "--draft-model", str(model_folder("llama"))],
            "expected a draft model of 2048 tokens, got 256",
        ),
    ],
)
def test_speculation_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
