"""`kvjax replay` as a person and as a program run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.cli.main import main
from kvjax.errors import MissingExtraError
from kvjax.replay import TraceRequest, read_trace, write_trace
from tests.cli.interrupting import interrupting_after

pytest.importorskip("matplotlib")
TRACE = [
    TraceRequest(0, 1_024, 20, (0, 1)),
    TraceRequest(500, 1_500, 20, (0, 1, 2)),
    TraceRequest(60_000, 1_024, 20, (0, 3)),
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_trace(TRACE, tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["replay", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_long_prompt_of_recurrent_layers_ends_steps_at_states(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prompts longer than a step's budget, beside each other: a step never leaves a state's block half way."""
    ids = tuple(range(50))
    trace = [TraceRequest(i * 10, 20_000 + 300 * i, 5, ids[: -(-(20_000 + 300 * i) // 512)]) for i in range(4)]
    write_trace(trace, tmp_path / "long.jsonl")
    arguments = (tmp_path / "long.jsonl", "--model", "qwen3-next-80b-a3b", "--memory", "60GiB")
    out = run(capsys, *arguments, "--max-num-batched-tokens", "2048", "--json", tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["refused_requests"] == 0
    assert data["output_tokens"] == 20
    assert "4 requests" in out


@pytest.mark.parametrize(
    ("model", "block_size", "hit_tokens"),
    [
        ("deepseek-v4-flash", 256, 1_024 + 512),  # blocks of 256, 64, 8 and 4 tokens
        ("qwen3-next-80b-a3b", 16, 1_024 + 512),  # a state at any 16 tokens
        ("gpt-oss-120b", 16, 1_024 + 512),
    ],
)
def test_models_of_several_block_sizes(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, model: str, block_size: int, hit_tokens: int
) -> None:
    path = tmp_path / "out.json"
    run(capsys, trace, "--serial", "--model", model, "--memory", "60GiB", "--json", path)
    data = json.loads(path.read_text())
    assert (data["block_size"], data["hit_tokens"]) == (block_size, hit_tokens)


def test_serial_json_and_plot(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    arguments = (trace, "--serial", "--num-blocks", 1_000, "--json", data_path, "--plot", plot_path)
    out = run(capsys, *arguments)
    assert "3 requests, one at a time; 3,548 prompt tokens" in out
    assert "tokens, this cache      1,536  3,548  43.29%" in out
    data = json.loads(data_path.read_text())
    expected = {
        "mode": "serial",
        "trace": trace,
        "requests": 3,
        "prompt_tokens": 3_548,
        "hit_tokens": 1_536,
        "token_hit_rate": 1_536 / 3_548,
        "infinite_hit_tokens": 1_536,
        "infinite_token_hit_rate": 1_536 / 3_548,
        "hit_blocks": 96,
        "prompt_blocks": 64 + 93 + 64,
        "preemptions": 0,
        "steps": 3,
        "num_blocks": [1_000],
        "block_size": 16,
    }
    assert data | expected == data
    assert data["host_us_per_step"] > 0
    assert plot_path.read_bytes().startswith(b"\x89PNG")


def test_bounds_beside_what_was_got(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A window's model with room for all: hits of 1,024 and 512 tokens.

    LRU keeps a checkpoint before the last token of a prompt, where the same prompt could go on: 1,023.
    """
    path = tmp_path / "out.json"
    arguments = (trace, "--serial", "--bound", "--model", "gpt-oss-120b", "--json", path)
    out = run(capsys, *arguments, "--memory", "60GiB")
    assert "used again last goes first           1,536  43.29%                 43.29%" in out
    bounds = json.loads(path.read_text())["bounds"]
    assert bounds.pop("memory_bytes") == json.loads(path.read_text())["memory_bytes"]
    assert bounds.pop("prompt_tokens") == 3_548
    assert bounds == {
        "free_exchange": 1_535,
        "clairvoyant": 1_536,
        "free_exchange_unforgetting": 1_536,
        "clairvoyant_unforgetting": 1_536,
    }
    run(capsys, *arguments, "--memory", "120MB", "--host-memory", "60GiB")
    assert json.loads(path.read_text())["bounds"]["clairvoyant"] == 1_536


def test_batched_json_and_plot(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    out = run(capsys, trace, "--num-blocks", 120, "--json", data_path, "--plot", plot_path, "--max-num-seqs", 4)
    assert "speed model: 30,000 prefill tokens/s; a step costs 1 ms" in out
    assert "first token" in out
    data = json.loads(data_path.read_text())
    assert data["mode"] == "batched"
    assert data["output_tokens"] == 60
    assert data["batching"] == {"max_num_batched_tokens": 8_192, "max_num_seqs": 4}
    assert data["virtual_seconds"] > 60
    assert data["max_running_requests"] == 1
    assert f"at most {data['max_running_requests']} requests ran and {data['max_waiting_requests']} waited" in out
    assert 0 < data["occupancy"]["mean_held"] <= data["occupancy"]["max_held"] <= 1
    assert plot_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "load", "words"),
    [
        (("--tokens-per-checkpoint", 99), (99, 1), "for a checkpoint (states, ends of windows) for every 99 tokens"),
        (("--request-len", 99), (99, None), "for requests of 99 tokens that all run"),
    ],
)
def test_pools_are_balanced_as_told(
    option: tuple[object, ...],
    load: tuple[int, int | None],
    words: str,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One request runs at a time."""
    file = tmp_path / "result.json"
    text = run(capsys, trace, "--serial", "--model", "jamba-1.5-mini", "--memory", "8GiB", *option, "--json", file)
    assert f"pools are balanced {words}" in text
    assert tuple(json.loads(file.read_text())["load"].values()) == load


@pytest.mark.parametrize("mode", ["--serial", "--no-progress"])
def test_an_interrupted_replay_is_that_of_the_requests_before(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace's third request comes a minute after the others, so the step before it is the end of these two."""
    write_trace(TRACE, tmp_path / "all.jsonl")
    write_trace(TRACE[:2], tmp_path / "two.jsonl")
    arguments = ("--num-blocks", 1_000, mode, "--json")
    run(capsys, tmp_path / "two.jsonl", *arguments, tmp_path / "two.json")
    monkeypatch.setattr("kvjax.cli.commands.replay.progress", interrupting_after(2))
    paths = [tmp_path / name for name in ("all.json", "all.png", "calls")]
    argv = (tmp_path / "all.jsonl", *arguments, paths[0], "--plot", paths[1], "--record", paths[2])
    assert main(["replay", *map(str, argv)]) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvjax: interrupted\n"
    assert "\ninterrupted after 2 of 3 requests; until then:\n2 requests, " in captured.out
    found, expected = (json.loads(path.read_text()) for path in (paths[0], tmp_path / "two.json"))
    assert (found.pop("interrupted"), expected.pop("interrupted")) == (True, False)
    differing = {"trace", "read_as", "trace_requests", "wall_seconds", "memory_bytes", "max_model_len"}
    same = [key for key in expected if key not in differing and not key.startswith("host_us")]
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert main(["replay", "--calls", str(paths[2])]) == 0


@pytest.mark.parametrize("mode", [("--serial",), ()])
def test_a_replay_interrupted_before_its_first_request_says_so(
    mode: tuple[str, ...], trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvjax.cli.commands.replay.progress", interrupting_after(0))
    assert main(["replay", trace, "--num-blocks", "1000", "--miss-reasons", "--bound", *mode]) == 130
    out = capsys.readouterr().out
    assert "\ninterrupted after 0 of 3 requests; until then:\n0 requests, " in out
    assert "exchanged freely" not in out


def test_an_interrupt_from_outside_ends_a_replay(tmp_path: Path) -> None:
    """A process that gets SIGINT once its bar shows that it replays."""
    path = tmp_path / "out.json"
    code = (
        "import sys; from kvjax.cli.commands import replay; from kvjax.cli.main import main; "
        "from tests.cli.interrupting import telling_after; "
        "replay.progress = telling_after(3); sys.exit(main(sys.argv[1:]))"
    )
    workload = ["replay", "--generate", "chat", "--num-requests", "100000", "--json", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *workload], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "replaying\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "kvjax: interrupted\n")
    data = json.loads(path.read_text())
    assert data["interrupted"]
    assert 3 <= data["done_requests"] < data["trace_requests"] == 100_000
    assert out.startswith(f"interrupted after {data['done_requests']:,} of 100,000 requests; until then:\n")


def test_reasons_of_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """110 blocks: the second prompt takes 94 of them, and leaves 16 of the first one's 64."""
    path, data_path = tmp_path / "trace.jsonl", tmp_path / "out.json"
    ids = [(0, 1), (2, 3, 4), (0, 1)]
    write_trace([TraceRequest(1_000 * i, 1_024 if i != 1 else 1_500, 1, ids[i]) for i in range(3)], path)
    arguments = (path, "--serial", "--num-blocks", 111)
    out = run(capsys, *arguments, "--miss-reasons", "--json", data_path)
    assert "evicted               752  21.20%" in out
    data = json.loads(data_path.read_text())
    tokens = {"evicted": 752, "never_seen": 1_008 + 1_488, "last_token": 16 + 16, "below_granularity": 12}
    assert data["misses"]["tokens"] == tokens
    assert data["hit_tokens"] + sum(tokens.values()) == data["prompt_tokens"]
    assert data["misses"]["evicted_seconds_ago"]["max"] == 1.0
    assert data["misses"]["evicted_blocks_ago"]["max"] == 46  # its 48th block, the first to go, is no hit
    assert data["misses"]["blocks_short"]["0"]["max"] == 47
    out = run(capsys, *arguments, "--miss-reasons", "--remember-evicted", 1)
    assert "as far as it remembers 1 block that" in out
    assert "evicted                16   0.45%" in out
    assert "never seen" not in run(capsys, *arguments)


@pytest.mark.parametrize("kind", ["chat", "agents", "documents"])
def test_workloads_are_generated_and_replayed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--generate", kind, "--num-requests", 20, "--serial", "--model", "gemma-3-27b", "--seed", 4)
    assert "20 requests, one at a time" in out


def test_a_workload_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.jsonl"
    assert "wrote 50 requests" in run(capsys, "--generate", "chat", "--num-requests", 50, "--write", path)
    assert len(read_trace(path)) == 50
    assert "20 requests" in run(capsys, path, "--num-requests", 20, "--serial")


def test_what_is_evicted_and_refused_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([*(TraceRequest(i, 16_384, 1, tuple(range(32 * i, 32 * i + 32))) for i in range(20))], path)
    out = run(capsys, path, "--serial", "--num-blocks", 1_030, "--plot", tmp_path / "p.png")
    assert "lifetime of a block's contents" in out
    assert main(["replay", str(path), "--serial", "--num-blocks", "1000", "--plot", str(tmp_path / "p.png")]) == 1
    captured = capsys.readouterr()
    assert "refused, since larger than the cache: 20 requests" in captured.out
    assert captured.err == "kvjax replay: every request is larger than the cache, and was refused\n"


@pytest.mark.parametrize("size", [("--num-blocks", 100), ("--memory", "210MB")])
def test_one_long_request_is_refused_and_the_others_run(
    size: tuple[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([TraceRequest(0, 300, 1, (0,)), TraceRequest(1, 3_000, 1, tuple(range(6)))], path)
    out = run(capsys, path, "--model", "llama-3-8b", *size)
    assert "refused, since larger than the cache: 1 request\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--num-blocks", "9"), "expected a TRACE or --generate {chat,agents,documents,scan,flood}, got none"),
        (
            ("TRACE", "--generate", "chat"),
            "expected a TRACE or --generate {chat,agents,documents,scan,flood}, got both",
        ),
        (("none.jsonl",), "expected a file that exists, got 'none.jsonl'"),
        (("TRACE", "--memory", "1MiB"), "bytes short; give more memory"),
        (("TRACE", "--model", "gpt"), "expected a model's name"),
        (("TRACE", "--max-num-batched-tokens", "8"), "expected max_num_batched_tokens >= max_num_seqs = 256"),
        (("--generate", "chat", "--seed", "-1"), "expected seed >= 0, got -1"),
    ],
)
def test_bad_input_is_one_clear_line(
    argv: tuple[str, ...], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(trace if word == "TRACE" else word for word in argv)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "expected a JSON object, got '{oops' ("),
        (
            '{"timestamp": 9, "hash_ids": []}',
            "expected the key 'input_length', got ['timestamp', 'hash_ids']",
        ),
        (
            '{"timestamp": -4, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}',
            "expected timestamp to be a number from 0 to 9.0072e+12, got -4",
        ),
        (
            '{"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "expected 2 hash_ids for 600 tokens (one per 512), got 1",
        ),
    ],
)
def test_bad_lines_are_named(line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    assert main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvjax replay: error: {path}:2: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--json", "/nowhere/x.json"), "argument --json: expected a file in a folder that exists"),
        (("--plot", "."), "argument --plot: expected a file to write, got the folder '.'"),
        (("--memory", "0"), "argument --memory: expected a size of at least 1 byte, got '0'"),
        (
            ("--generate", "chats"),
            "argument --generate: expected one of chat, agents, documents, scan, flood, got 'chats'",
        ),
    ],
)
def test_bad_arguments_are_refused_before_the_work(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "trace.jsonl", *argv])
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_plot_without_matplotlib_names_the_extra(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtraError, match=r"--plot needs matplotlib, which is not installed: pip install 'kvjax\[plots\]'"
    ):
        main(["--debug", "replay", trace, "--plot", "x.png"])


@pytest.mark.parametrize("policy", ["lru", "slru", "cost", "belady"])
def test_every_policy_can_be_asked_for(
    policy: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_path = tmp_path / "out.json"
    out = run(capsys, trace, "--policy", policy, "--serial", "--num-blocks", 200, "--json", data_path)
    assert f"sha256_cbor, {policy} eviction\n" in out
    assert json.loads(data_path.read_text())["eviction_policy"] == policy


def test_windows_and_states_are_cached_where_hits_end(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for options in (("--retention-interval", "all", "--policy", "lru"), ("--retention-interval", 0, "--policy", "lru")):
        path = tmp_path / "out.json"
        out = run(capsys, trace, "--serial", "--model", "gpt-oss-120b", *options, "--json", path)
        found.append(json.loads(path.read_text()))
        assert ("windows, chunks and states are kept where requests end or part" in out) == (0 in options)
    assert [data["retention_interval"] for data in found] == [None, 0]
    assert found[1]["registered_blocks"] < 0.8 * found[0]["registered_blocks"]


def test_a_retention_interval_below_zero_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", trace, "--retention-interval", "-1"])
    assert "argument --retention-interval: expected auto, all or an integer >= 0, got '-1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model", "gemma-3-27b", "--retention-interval", 40),
            "expected retention_interval as a multiple of 16 (the LCM of the block sizes), or 0, got 40",
        ),
        (
            ("--policy", "belady", "--block-size", 48),
            "expected a block size that divides 512, the trace's, to look ahead",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    options: tuple[object, ...], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, "--serial", "--num-blocks", "500", *map(str, options)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--policy lru", "--retention-interval all"])
def test_rules_decide_what_is_cached_and_evicted(option: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", trace, "--num-blocks", "1000", "--rules", "vllm-0.16.0", *option.split()]
    assert main(arguments) == 2
    expected = f"expected --rules vllm-0.16.0 or {option.split()[0]}, got both: rules decide that too"
    assert expected in capsys.readouterr().err


def test_rules_of_a_release_are_those_of_the_manager(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The release's name, and what it says."""
    path = tmp_path / "out.json"
    shared = (trace, "--serial", "--model", "gpt-oss-120b", "--memory", "1GB", "--json", path)
    out = run(capsys, *shared, "--rules", "vllm-0.16.0")
    values = json.loads(path.read_text())
    assert "caching and eviction by the rules of vLLM 0.16.0" in out
    assert "lru eviction, unhashed blocks in turn" in out
    told = {name: values[name] for name in ("release", "free_order", "eviction_policy", "retention_interval")}
    assert told == {
        "release": "0.16.0",
        "free_order": "append",
        "eviction_policy": "lru",
        "retention_interval": None,
    }


@pytest.mark.parametrize("generated", [True, False])
def test_whole_blocks_cut_traces_and_workloads(
    generated: bool, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To whole hash blocks and one token."""
    source = ("--generate", "chat", "--num-requests", 20) if generated else (trace,)
    run(capsys, *source, "--write", tmp_path / "as_it_is.jsonl")
    run(capsys, *source, "--whole-blocks", "--write", tmp_path / "cut.jsonl")
    lengths = [
        [request.input_length for request in read_trace(tmp_path / f"{name}.jsonl")] for name in ("as_it_is", "cut")
    ]
    assert lengths[1] == [length // 512 * 512 + 1 for length in lengths[0]]
