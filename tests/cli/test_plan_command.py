"""`kvjax plan` as a person and as a program run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvjax.cli.main import main
from kvjax.configs import known_models, load_model_config
from kvjax.planning import with_state_blocks
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE
from kvjax.replay import BatchingConfig, ReplayConfig, generate_workload, run_replay, write_trace


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def planned(path: Path, *argv: str) -> dict[str, Any]:
    """What `--json` writes into a folder that exists."""
    assert main(["plan", *argv, "--json", str(path / "plan.json")]) == 0
    values: dict[str, Any] = json.loads((path / "plan.json").read_text(encoding="utf-8"))
    return values


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


@pytest.mark.filterwarnings("always::kvjax.errors.NeverHitsWarning")
def test_a_cache_that_can_never_hit_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 544 tokens, requests of 500."""
    argv = ["plan", "qwen3-next-80b-a3b", "--memory", "80GB", "--max-model-len", "500", "--state-block-size", "2048"]
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert err.startswith("kvjax: warning: prefix caching is on, and no prompt can ever hit: hits are multiples of 544")
    assert err.count("\n") == 1


def test_worked_example_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file comes beside the text, which is as without it."""
    argv = ("llama-3-70b", "--memory", str(56 * 2**30), "--max-model-len", "131072")
    data = planned(tmp_path, *argv)
    assert capsys.readouterr().out == run(capsys, *argv)
    assert data["pools"][0]["num_blocks"] == 11_468
    assert data["groups"][0]["page_bytes"] == 65_536
    assert data["model"] == "llama-3-70b"
    assert round(data["requests_that_fit"]["131072"], 1) == 1.4


def test_a_deployment_fills_what_is_not_given(tmp_path: Path) -> None:
    deployed = planned(tmp_path, "--deployment", "llama-3-70b-56gib")
    assert deployed["pools"][0]["num_blocks"] == 11_468
    shorter = planned(tmp_path, "--deployment", "llama-3-70b-56gib", "--num-blocks", "9000")
    assert shorter["pools"][0]["num_blocks"] == 9_000
    assert shorter["memory_bytes"] is None


def test_hybrid_models_show_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "gemma-3-27b", "--memory", "40GiB", "--lengths", "1024,131072", "--platform", "tpu")
    assert "sliding_window 1,024" in out
    assert "full_attention" in out
    together = run(capsys, "gemma-3-27b", "--memory", "80GiB", "--no-hybrid", "--max-model-len", "32768")
    assert "sliding_window" not in together


def test_the_longest_request_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("llama-4-scout", "--memory", "60GiB")
    data = planned(tmp_path, *argv, "--max-model-len", "auto")
    capsys.readouterr()
    longest = data["max_model_len"]
    assert 1_000_000 < longest < 10_485_760
    assert data["concurrency"] >= 1
    assert "bytes short" in error(capsys, *argv, "--max-model-len", str(longest + 1))
    assert f"The longest request that fits has {longest:,} tokens" in error(capsys, *argv)


@pytest.mark.parametrize("name", known_models())
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_shipped_model_can_be_planned(capsys: pytest.CaptureFixture[str], name: str, platform: str) -> None:
    out = run(capsys, name, "--memory", "141GiB", "--max-model-len", "auto", "--platform", platform)
    assert out.startswith(f"{name}: ")
    assert ("scalar memory" in out) == (platform == "tpu")


def test_parallel_deployments_show_their_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ranks = ("--tensor-parallel", "8", "--decode-context-parallel", "8", "--data-parallel", "2")
    out = run(capsys, "deepseek-v3", "--memory", "60GiB", *ranks)
    assert "16 x gpu" in out
    words = " ".join(out.split())
    assert "Context parallelism over 8 ranks splits the tokens of a head" in words
    assert "Each of 2 replicas has requests and a cache of its own: together 89.5 requests of 163,840" in words
    data = planned(tmp_path, "deepseek-v3", "--memory", "60GiB", *ranks)
    assert (data["num_devices"], data["decode_context_parallel"], data["data_parallel"]) == (16, 8, 2)


def test_layers_that_share_pages_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "15 more layers have no pages of their own" in run(capsys, "gemma-3n-e4b", "--memory", "4GiB")
    data = planned(tmp_path, "gemma-3n-e4b", "--memory", "4GiB")
    assert data["shared_layers"]["layers.34"] == "layers.19"


def test_a_usual_length_balances_the_pools(tmp_path: Path) -> None:
    argv = ("deepseek-v4-flash", "--memory", "60GiB", "--lengths", "8192")
    longest, usual = (planned(tmp_path, *argv, "--request-len", length) for length in ("1048576", "8192"))
    assert usual["balances"][0]["load"] == {"tokens_per_checkpoint": 8_192, "max_running": None}
    assert usual["requests_that_fit"]["8192"] > 10 * longest["requests_that_fit"]["8192"]


def test_a_deployment_s_balance_is_replaced(tmp_path: Path) -> None:
    """Either way to say it takes the place of the other."""
    file = tmp_path / "some.toml"
    for ours, theirs, load in (
        ("request_len = 64", ("--tokens-per-checkpoint", "4096"), (4_096, 256)),
        ("tokens_per_checkpoint = 64", ("--request-len", "4096"), (4_096, None)),
        ("tokens_per_checkpoint = 64", ("--max-num-seqs", "7"), (64, 7)),
    ):
        file.write_text(f'model = "jamba-1.5-mini"\nmemory = "20GiB"\n{ours}\n')
        balances = planned(tmp_path, "--deployment", str(file), *theirs)["balances"]
        assert tuple(balances[0]["load"].values()) == load


def test_a_trace_balances_the_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `kvjax replay` plans for it in batches, of the same longest request; short chats want more states."""
    loads = []
    for kind in ("chat", "documents"):
        trace, file = generate_workload(kind, 40, 0), tmp_path / f"{kind}.jsonl"
        write_trace(trace, file)
        specs = with_state_blocks(load_model_config("jamba-1.5-mini").kv_cache_specs(), STATE_BLOCK_SIZE)
        longest = max(request.input_length + request.output_length for request in trace)
        argv = ("jamba-1.5-mini", "--memory", "1GiB", "--trace", str(file), "--max-model-len", str(longest))
        argv += ("--no-one-memory",)
        load = planned(tmp_path, *argv, "--max-num-seqs", "3")["balances"][0]["load"]
        config = ReplayConfig(specs, memory_bytes=2**30, one_memory=False, batching=BatchingConfig(max_num_seqs=3))
        assert load == vars(run_replay(trace, config).plan.load)
        loads.append(load["tokens_per_checkpoint"])
    assert 2 * loads[0] < loads[1]
    assert "request lines (Mooncake" in capsys.readouterr().out


def test_configs_are_found_from_any_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "36 layers" in run(capsys, "qwen3-8b", "--memory", "40GiB")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--memory", "8GiB"), "expected a MODEL or a deployment that names one; shipped: deepseek-v3"),
        (("gpt-5",), "expected a model's name (deepseek-v3, deepseek-v3.2, deepseek-v4-flash"),
        (("qwen3-8b",), "expected --memory or --num-blocks, got none"),
        (("qwen3-8b", "--num-blocks", "9", "--trace", "x"), "expected --trace with --memory, without --tokens"),
        (
            ("qwen3-8b", "--num-blocks", "9", "--max-model-len", "auto"),
            "expected --memory with --max-model-len auto, got none",
        ),
        (
            ("qwen3-8b", "--memory", "1MiB", "--max-model-len", "auto"),
            "of the planned length needs 4,718,592 bytes (4.50 MiB), got 1,048,576",
        ),
        (
            ("deepseek-v4-flash", "--memory", "40GiB", "--block-size", "64"),
            "expected block_size to be a multiple of 128 (all compression ratios), got 64",
        ),
        (
            ("gpt-oss-120b", "--memory", "40GiB", "--decode-context-parallel", "2"),
            "expected decode_context_parallel to divide the 1 tensor ranks that hold the same KV heads, got 2",
        ),
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
        (("--deployment", "moon"), "expected a deployment's name (deepseek-v4-flash-h200-8, gemma-3-27b-v6e-4"),
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
        (("--memory", "5X"), "argument --memory: expected a size in bytes such as 60129542144, 56GiB (binary)"),
        (("--max-model-len", "0"), "argument --max-model-len: expected auto or an integer >= 1, got '0'"),
        (("--lengths", "1,x"), "argument --lengths: expected an integer >= 1, got 'x'"),
    ],
)
def test_bad_arguments_name_the_option(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "qwen3-8b", *argv])
    assert message in capsys.readouterr().err
