"""scripts/tune_gpu.py: candidates, what it does with times and without a card. Nothing is compiled or timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.cases.case import Step
from pallas_kernels.cases.find import case_types
from pallas_kernels.ragged_paged_attention.kernel_gpu import Tuning
from scripts import tune_gpu
from scripts.lab.bench import time_cases
from scripts.lab.bench.timing import Timing
from scripts.lab.compiled import case_of
from scripts.lab.tuning.entries import entries

(ENTRY,) = entries(["llama3-8b"], [1], [16])
ONE_ENTRY = ["h100", "--model=llama3-8b", "--tp=1", "--page=16"]


def test_candidates_are_sizes_of_the_kernel() -> None:
    found = list(tune_gpu.candidates_of(ENTRY))
    assert found[0] == {}
    assert {name for sizes in found for name in sizes} == set(Tuning._fields)
    assert len({tuple(sizes.items()) for sizes in found}) == len(found)


def test_sizes_belong_to_a_part() -> None:
    sizes = {"decode_block": 64, "num_blocks": 264, "prefill_stages": 3}
    assert tune_gpu.part_sizes("decode", sizes) == {"decode_block": 64, "num_blocks": 264}
    assert tune_gpu.part_sizes("prefill", sizes) == {"prefill_stages": 3}


def on_card(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[dict[str, int]], Any], card: str | None = "h100"
) -> None:
    """This machine has `card`, where candidates give what `answer` makes of their sizes."""

    def time_in_process(arguments: list[str], _: float) -> Any:
        if not arguments:
            return card
        op, text = arguments
        cases = {part: case_types()[op](**fields) for part, fields in json.loads(text).items()}
        assert {(case.heads, case.page, case.tuned) for case in cases.values()} == {(32, 16, 0)}
        sizes = {name: size for case in cases.values() for name in Tuning._fields if (size := getattr(case, name))}
        return answer(sizes)

    monkeypatch.setattr(tune_gpu, "_time", time_in_process)


def test_the_fastest_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(sizes: dict[str, int]) -> dict[str, float]:
        if sizes.get("decode_stages") == 4:
            raise RuntimeError("too much shared memory")
        times = {"decode": 80.0 if sizes.get("decode_block") == 64 else 100.0, "prefill": 500.0}
        return {part: time for part, time in times.items() if not sizes or tune_gpu.part_sizes(part, sizes)}

    on_card(monkeypatch, answer)
    path, figures = tmp_path / "h100.json", tmp_path / "figures.json"
    assert tune_gpu.main([*ONE_ENTRY, f"--out={path}", f"--json={figures}"]) == 0
    data = json.loads(path.read_text())
    assert data["by"] == "time"
    assert data["entries"] == [{"shape": ENTRY.shape._asdict(), "sizes": {"decode_block": 64, "decode_stages": 2}}]
    assert "too much shared memory" in capsys.readouterr().err
    assert [choice["part"] for choice in json.loads(figures.read_text())] == ["decode", "prefill"]


def test_a_formula_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def answer(sizes: dict[str, int]) -> Any:
        asked.append(sizes)
        raise RuntimeError("died")

    on_card(monkeypatch, answer)
    assert tune_gpu.main([*ONE_ENTRY, f"--out={tmp_path / 'h100.json'}"]) == 1
    assert asked == [{}]
    assert list(tmp_path.iterdir()) == []


def test_another_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_card(monkeypatch, dict, card="h200")
    with pytest.raises(SystemExit):
        tune_gpu.main(ONE_ENTRY)
    assert "expected the card of this machine, h200, or --dry-run, got h100" in capsys.readouterr().err


def test_without_a_card_candidates_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Registers, spills and shared memory of every candidate, no time, no file; results are kept."""
    compiled = []

    def compile_op(card: str, op: str, settings: list[str], timeout_s: float) -> list[dict[str, Any]]:
        compiled.append(case_of("gpu", op, settings))
        figures = {
            "how": "linked",
            "registers": 168,
            "spill_store_bytes": 4,
            "spill_load_bytes": 8,
            "shared_bytes": 999,
        }
        names = ("rpa_decode_p16_b128", "rpa_prefill_p16_b128", "rpa_merge_pieces")
        return [{"module": op}, *({"kernel": name, **figures} for name in names)]

    on_card(monkeypatch, dict, card=None)
    monkeypatch.setattr(tune_gpu, "compile_op", compile_op)
    arguments = [*ONE_ENTRY, f"--out={tmp_path / 'h100.json'}", f"--results={tmp_path / 'results.json'}"]
    assert tune_gpu.main(arguments) == tune_gpu.main([*arguments, "--dry-run"]) == 0
    wanted = [
        {name: size for name, size in sizes.items() if name != "num_blocks"} for sizes in tune_gpu.candidates_of(ENTRY)
    ]
    found = [{name: size for name in Tuning._fields if (size := getattr(case, name))} for case in compiled]
    assert found == [{}, *(sizes for sizes in wanted if sizes)]
    assert {(case.heads, case.page, case.tuned, case.write) for case in compiled} == {(32, 16, 0, 0)}
    said = capsys.readouterr().out
    assert "decode    formula                              linked         168      12     999" in said
    for warpgroups in (3, 2):
        words = f"block=64 stages=2 warpgroups={warpgroups}"
        assert f"prefill   {words}       linked         168      12     999" in said
    assert not (tmp_path / "h100.json").exists()


def test_a_candidate_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compile_op(*_: object, **__: object) -> list[dict[str, Any]]:
        raise RuntimeError("attention: no CUDA")

    monkeypatch.setattr(tune_gpu, "compile_op", compile_op)
    assert tune_gpu.main([*ONE_ENTRY, "--dry-run"]) == 1
    assert "llama3-8b / 1, page 16 : attention: no CUDA" in capsys.readouterr().err


def test_processes_that_fail_or_hang() -> None:
    with pytest.raises(RuntimeError, match=r"no end after 0\.01 s"):
        tune_gpu._time([], 0.01)
    with pytest.raises(RuntimeError, match=r"expected a card out of \['h100', 'h200'\], got None"):
        tune_gpu._time(["ragged_paged_attention", "{}"], 200)


@pytest.mark.parametrize("part", tune_gpu.PARTS)
def test_what_is_timed_can_be_traced(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Pages are rotated through at least twice what the cache holds; the kernel has the candidate's sizes."""
    traced = []

    def clock(chain: Any, repeats: int) -> Timing:
        traced.append(str(jax.make_jaxpr(chain.program)(*chain.arguments)))
        return Timing((3.0,) * repeats, "wall")

    monkeypatch.setattr(time_cases, "wall_clock", clock)
    case = ENTRY.timed(part, {f"{part}_block": 64}, Step(small=True))
    assert time_cases.median_us(case, 1) == 3.0
    assert f"rpa_{part}_p16_b64" in traced[0]


def test_a_budget_begins_no_more_candidates_and_the_formula_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first candidate, the formula, is always measured; results of a run go on from there."""
    seen: list[dict[str, int]] = []

    def answer(sizes: dict[str, int]) -> dict[str, float]:
        seen.append(sizes)
        clock.append(clock[-1] + 30.0)
        return {part: 10.0 for part in tune_gpu.PARTS if not sizes or tune_gpu.part_sizes(part, sizes)}

    clock = [0.0]
    on_card(monkeypatch, answer)
    monkeypatch.setattr("scripts.lab.tuning.tuner.time.monotonic", lambda: clock[-1])
    files = ["--out", str(tmp_path / "h100.json"), "--results", str(tmp_path / "results.json")]
    assert tune_gpu.main([*ONE_ENTRY, *files, "--budget", "0.75"]) == 0
    assert seen == [{}, next(sizes for sizes in tune_gpu.candidates_of(ENTRY) if sizes)]
    assert "no time for more than 2 candidates" in capsys.readouterr().err
    assert tune_gpu.main([*ONE_ENTRY, *files]) == 0
    assert len(seen) == len(list(tune_gpu.candidates_of(ENTRY)))


def test_the_list_says_how_many_candidates_a_case_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_gpu.main([*ONE_ENTRY, "--list"]) == 0
    assert capsys.readouterr().out == f"{ENTRY.label}: {len(list(tune_gpu.candidates_of(ENTRY)))} candidates\n"


def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"error: expected a model out of .*got 'llama9'"):
        tune_gpu.main(["h100", "--model", "llama9", "--list"])
