"""The host benchmark's driver: which cases there are, how they are picked, what is printed and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
NAMES = {
    *(f"decode_step/{groups}/{rows}" for groups in ("full", "hybrid") for rows in (256, 1024, 4096)),
    *(f"decode_step/{kind}/1024" for kind in ("mla", "chunked", "sink", "cross")),
    "decode_step/full/1024/evicting",
    *(f"decode_step_with_tokens/full/{rows}" for rows in (256, 1024)),
    *(f"admit/{size}" for size in ("40", "200", "1k", "4k")),
    "first_chunk/1M",
    "engine_step/1024",
    "engine_step/hybrid/1024",
    *(f"step_inputs/{groups}/1024" for groups in ("full", "hybrid")),
    "verify_step/full/1024",
    "allocate_slots/decode",
    "allocate/32k",
    "prefix_hit/2k",
    "prefix_hit/32k",
    "free/32k",
    *(f"hash/{algorithm}/32k" for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
    *(f"pool/{call}/1000" for call in ("get", "free", "get_evicting")),
    *(
        f"evict/{part}/{policy}"
        for part in ("inside_admission", "between_steps")
        for policy in ("probation", "learned")
    ),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, imported as it imports its cases: from the scripts folder."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(SCRIPTS)
    yield import_module("bench_host")
    for name in set(sys.modules) - before:
        if name.startswith("bench_host"):
            del sys.modules[name]


@pytest.fixture
def two_cases(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        driver.BenchCase("a/slow/1", lambda: [4.0, 2.0, 3.0], lambda: [9.0]),
        driver.BenchCase("b/fast/1", lambda: [1.0], lambda: [10.0, 30.0]),
    ]
    monkeypatch.setattr(driver, "all_cases", lambda: cases)


def test_every_case_has_a_name_of_its_own(driver: ModuleType) -> None:
    names = [case.name for case in driver.all_cases()]
    assert len(names) == len(set(names))
    assert set(names) >= NAMES


@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.startswith(("pool/", "admit/", "evict/"))))
def test_a_case_gives_samples_of_both_sides(driver: ModuleType, name: str) -> None:
    (case,) = (case for case in driver.all_cases() if case.name == name)
    assert all(sample > 0 for sample in (*case.run(), *case.baseline()))


@pytest.mark.usefixtures("two_cases")
def test_medians_and_their_ratio_are_printed_and_written(
    driver: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    assert driver.main(["--json", str(path), "--runs", "2"]) == 0
    assert json.loads(path.read_text()) == [
        {"name": "a/slow/1", "median_us": 3.0, "baseline_us": 9.0, "runs": 2},
        {"name": "b/fast/1", "median_us": 1.0, "baseline_us": 20.0, "runs": 2},
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["case", "median", "us", "baseline", "us", "ratio"]
    assert lines[1].split() == ["a/slow/1", "3.0", "9.0", "3.0x"]
    assert lines[2].split() == ["b/fast/1", "1.0", "20.0", "20.0x"]


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize(("pattern", "names"), [("fast", ["b/fast/1"]), ("?/*/1", ["a/slow/1", "b/fast/1"])])
def test_a_pattern_picks_cases(
    driver: ModuleType, capsys: pytest.CaptureFixture[str], pattern: str, names: list[str]
) -> None:
    assert driver.main(["--list", "--only", pattern]) == 0
    assert capsys.readouterr().out.split() == names


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "none"], "no case matches 'none'; --list names them"),
        (["--json", "/nowhere/x.json"], "argument --json: expected a file in a folder that exists"),
        (["--runs", "0"], "expected --runs of at least 1, got 0"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    driver: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        driver.main(arguments)
    assert message in capsys.readouterr().err


def test_preparation_is_not_timed(driver: ModuleType) -> None:
    sample_us = sys.modules["bench_host_cases.case"].sample_us
    calls: list[str] = []
    samples = sample_us(lambda: calls.append("timed"), 3, lambda: calls.append("prepared"))
    assert len(samples) == 3
    assert calls == ["prepared", "timed"] * 4


def test_a_figure_is_the_least_of_the_rounds_medians(driver: ModuleType) -> None:
    ours, theirs = iter([[9.0, 8.0, 7.0], [4.0, 2.0, 3.0]]), iter([[5.0], [6.0]])
    case = driver.BenchCase("a", lambda: next(ours), lambda: [1.0], lambda: next(theirs))
    result = driver.measure(case, 2, vllm=True)
    assert (result.median_us, result.baseline_us, result.vllm_us) == (3.0, 1.0, 5.0)
    assert driver.row(result).split()[-2:] == ["5.0", "1.7x"]


def test_a_vllm_that_is_not_set_up_is_told_how_to(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVJAX_VLLM_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=r"make it: scripts/vllm_conformance\.sh 0\.1\.2 --setup-only"):
        driver.run_beside_vllm("0.1.2", [])
