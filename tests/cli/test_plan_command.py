"""`kvjax plan` as a person and as a program run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_worked_example_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "llama-3-70b", "--memory", "56GiB", "--max-model-len", "131072")
    assert "11,468" in out
    assert "65,536" in out
    assert "131,072          1.4      183,472" in out
    assert "Note: the model's own config says at most 8,192 tokens." in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_worked_example_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "llama-3-70b", "--memory", str(56 * 2**30), "--max-model-len", "131072", "--json"))
    assert data["pools"][0]["num_blocks"] == 11_468
    assert data["groups"][0]["page_bytes"] == 65_536
    assert data["model"] == "llama-3-70b"
    assert round(data["requests_that_fit"]["131072"], 1) == 1.4


def test_a_deployment_fills_what_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    deployed = json.loads(run(capsys, "--deployment", "llama-3-70b-56gib", "--json"))
    assert deployed["pools"][0]["num_blocks"] == 11_468
    shorter = json.loads(run(capsys, "--deployment", "llama-3-70b-56gib", "--num-blocks", "99", "--json"))
    assert shorter["pools"][0]["num_blocks"] == 99
    assert shorter["memory_bytes"] is None


def test_hybrid_models_show_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "gemma-3-27b", "--memory", "40GiB", "--lengths", "1024,131072", "--platform", "tpu")
    assert "sliding_window 1,024" in out
    assert "full_attention" in out
    together = run(capsys, "gemma-3-27b", "--memory", "80GiB", "--no-hybrid", "--max-model-len", "32768")
    assert "sliding_window" not in together


def test_configs_are_found_from_any_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "36 layers" in run(capsys, "qwen3-8b", "--memory", "40GiB")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "expected a MODEL or a deployment that names one; shipped: gemma-3-27b"),
        (("gpt-5",), "expected a model's name (gemma-3-27b, llama-3-70b, llama-3-8b"),
        (("qwen3-8b",), "expected --memory or --num-blocks, got none"),
        (
            ("qwen3-8b", "--memory", "1GiB", "--num-blocks", "9"),
            "expected one of memory_bytes and num_blocks, got both",
        ),
        (("qwen3-8b", "--memory", "1GiB"), "bytes short; give more memory"),
        (("qwen3-8b", "--memory", "9GiB", "--dtype", "bf16"), "expected a KV-cache dtype out of"),
        (
            ("qwen3-8b", "--memory", "9GiB", "--tensor-parallel", "3"),
            "expected tensor_parallel to divide the 8 KV heads",
        ),
        (("qwen3-8b", "--memory", "9GiB", "--lengths", "50000"), "expected a length in [1, 40960] (max_model_len)"),
        (("--deployment", "moon"), "expected a deployment's name (gemma-3-27b-v6e-4"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    assert message in error(capsys, *argv)


def test_unknown_keys_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, deployment = tmp_path / "config.json", tmp_path / "deployment.toml"
    shipped = json.loads((Path(__file__).parents[2] / "configs" / "models" / "qwen3-8b.json").read_text())
    model.write_text(json.dumps(shipped | {"kv_lora_rank": 512}))
    deployment.write_text('model = "qwen3-8b"\nmemry = "40GiB"\n')
    assert f"{model}: unknown keys kv_lora_rank" in error(capsys, str(model), "--memory", "40GiB")
    assert f"{deployment}: unknown keys memry; expected some of" in error(capsys, "--deployment", str(deployment))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--memory", "0"), "argument --memory: expected a size of at least 1 byte, got '0'"),
        (("--memory", "5G"), "argument --memory: expected a size in bytes such as 60129542144, 56GiB (binary)"),
        (("--max-model-len", "0"), "argument --max-model-len: expected an integer >= 1, got '0'"),
        (("--lengths", "1,x"), "argument --lengths: expected an integer >= 1, got 'x'"),
    ],
)
def test_bad_arguments_name_the_option(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "qwen3-8b", *argv])
    assert message in capsys.readouterr().err
