"""`kvjax replay` over several replicas, as a person and as a program run it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.cli.main import main
from kvjax.replay import write_trace
from tests.cli.interrupting import interrupting_after
from tests.replay.replicas.test_fleet import conversations

ARGUMENTS = ("--num-blocks", "300", "--no-progress")
TIERS = ("--host-memory", "1GiB", "--disk-memory", "2GiB", "--shared-disk")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    requests = [replace(one, timestamp_ms=5 * one.timestamp_ms) for one in conversations(5, 3)]
    write_trace(requests, tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def run(argv: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    assert main(["replay", *argv, *ARGUMENTS, "--json", str(path)]) == 0
    return capsys.readouterr().out, json.loads(path.read_text())


def test_replicas_with_tiers(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    out, values = run([trace, "--replicas", "2", *TIERS], path, capsys)
    assert (values["trace"], values["replicas"], values["router"]) == (trace, 2, "prefix")
    assert values["tiers"]["loaded_tokens"] > 0
    assert values["token_hit_rate"] == values["infinite_token_hit_rate"] > 0.4
    assert f"{values['tiers']['loaded_tokens']:,} tokens" in out
    assert "1.00 GiB of host memory each at 25 GB/s, one disk for all of 2.00 GiB at 5 GB/s" in out
    _, pools = run([trace, "--replicas", "2"], path, capsys)
    assert pools["token_hit_rate"] < values["token_hit_rate"]
    assert "tiers" not in pools


def test_routers_stand_side_by_side(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    routers = [word for name in ("round_robin", "prefix", "round_robin") for word in ("--router", name)]
    out, values = run([trace, "--replicas", "2", *routers], path, capsys)
    assert [one["router"] for one in values["routers"]] == ["round_robin", "prefix"]
    assert not values["interrupted"]
    for one in values["routers"]:
        _, alone = run([trace, "--replicas", "2", "--router", one["router"]], path, capsys)
        assert {key for key in one if one[key] != alone[key]} <= {"wall_seconds"}
        assert f"{one['token_hit_rate']:.2%}" in out


def test_prefill_and_decode_apart_beside_mixed_replicas(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = ("--transfer-gb-per-s", "10", "--transfer-latency-us", "500", "--router", "least_loaded")
    sides = ("--prefill-replicas", "1", "--decode-replicas", "2")
    out, values = run([trace, *sides, *links, *TIERS], tmp_path / "out.json", capsys)
    assert values["mixed"]["replicas"] == 3
    assert values["router"] == values["mixed"]["router"] == "least_loaded"
    assert (values["transfer"]["bytes_per_s"], values["transfer"]["latency_s"]) == (10e9, 5e-4)
    assert values["transfer"]["transfers"] == values["done_requests"] == 15
    assert values["transfer"]["sent_bytes"] == values["transfer"]["sent_tokens"] * 131_072  # Llama 3 8B
    assert 0 < values["prefill"]["busy"] < 1
    assert values["time_to_second_token_seconds"]["median"] > values["time_to_first_token_seconds"]["median"]
    for words in ("1 prefill + 2 decode replicas beside 3 mixed ones", "sent: ", "at 10 GB/s and 500 us"):
        assert words in out
    assert f"{values['prefill']['token_hit_rate']:.2%}" in out


def test_an_interrupt_leaves_the_routers_before_it(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvjax.cli.replay.replicas.progress", interrupting_after(15))
    path = tmp_path / "out.json"
    routers = ("--router", "prefix", "--router", "round_robin")
    assert main(["replay", trace, "--replicas", "2", *routers, *ARGUMENTS, "--json", str(path)]) == 130
    values = json.loads(path.read_text())
    assert values["interrupted"]
    assert [(one["router"], one["interrupted"]) for one in values["routers"]] == [("prefix", False)]


@pytest.mark.parametrize("sides", [("--replicas", "2"), ("--prefill-replicas", "1", "--decode-replicas", "1")])
def test_an_interrupt_prints_what_is_done(
    sides: tuple[str, ...],
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvjax.cli.replay.replicas.progress", interrupting_after(4))
    path = tmp_path / "out.json"
    assert main(["replay", trace, *sides, *ARGUMENTS, "--json", str(path)]) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvjax: interrupted\n"
    assert "\ninterrupted after " in captured.out
    values = json.loads(path.read_text())
    assert values["interrupted"]
    assert 4 <= values["done_requests"] < values["trace_requests"] == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prefill-replicas 2", "expected --prefill-replicas P and --decode-replicas D, got --prefill-replicas alone"),
        ("--decode-replicas 2", "got --decode-replicas alone"),
        ("--replicas 2 --prefill-replicas 2 --decode-replicas 2", "--decode-replicas D, got both"),
        ("--replicas 2 --transfer-gb-per-s 1", "--decode-replicas D with --transfer-gb-per-s, got neither"),
        ("--transfer-latency-us 0", "--decode-replicas D with --transfer-latency-us, got neither"),
        ("--router prefix", "expected --replicas N, or --prefill-replicas P and --decode-replicas D, with --router"),
        ("--shared-disk --disk-memory 1GiB", "--decode-replicas D, with --shared-disk"),
        ("--replicas 2 --shared-disk", "expected --disk-memory BYTES with --shared-disk, got none"),
        ("--replicas 2 --shared-disk --host-memory 1GiB", "expected --disk-memory BYTES with --shared-disk, got none"),
        (
            "--prefill-replicas 1 --decode-replicas 1 --router prefix --router least_loaded",
            "expected one --router with --prefill-replicas, got 2",
        ),
        ("--replicas 2 --serial", "expected --serial for one replica, got it with several"),
        ("--replicas 2 --plot x.png", "expected --plot for one replica"),
        ("--replicas 2 --record x", "expected --record for one replica"),
        ("--prefill-replicas 1 --decode-replicas 1 --miss-reasons", "expected --miss-reasons for one replica"),
        ("--replicas 2 --bound", "expected --bound for one replica"),
        ("--replicas 2 --policy belady", "expected continuous batching under lru, slru or cost"),
        ("--replicas 2 --write-through", "expected --host-memory or --disk-memory BYTES with --write-through"),
    ],
)
def test_options_that_contradict_one_another_are_one_clear_line(
    options: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *options.split(), *ARGUMENTS]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--replicas 0", "argument --replicas: expected an integer >= 1, got '0'"),
        ("--router fastest", "argument --router: expected one of round_robin, least_loaded, prefix, got 'fastest'"),
        ("--transfer-gb-per-s 0", "argument --transfer-gb-per-s: expected a number > 0, got '0'"),
        ("--transfer-latency-us -1", "argument --transfer-latency-us: expected a number >= 0, got '-1'"),
    ],
)
def test_bad_values_are_refused_before_the_work(
    options: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", trace, *options.split()])
    assert message in capsys.readouterr().err
