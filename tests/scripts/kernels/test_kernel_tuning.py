"""The tuners: entries, candidates, results that are kept, what is chosen and written. Nothing is compiled or timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pallas_kernels.ragged_paged_attention.kernel_tpu import Tuning
from pallas_kernels.ragged_paged_attention.tuning import OP, TunedShape
from pallas_kernels.tuned import read_table
from scripts import tune_tpu
from scripts.lab.compiled import case_of
from scripts.lab.tpu.bundles import Kernel, Loop
from scripts.lab.tpu.compiler import Compilation, CompilationError
from scripts.lab.tuning.choice import Choice, Record, choose, write_tuned
from scripts.lab.tuning.entries import Entry, candidates, entries
from scripts.lab.tuning.tuner import Log

(ENTRY,) = entries(["llama3-8b"], [1], [128])


def record(decode: float | None, **sizes: int) -> Record:
    return {"decode": {"sizes": {"decode_block": 512, **sizes}, "cost": decode}}


def test_entries_of_equal_shapes_once() -> None:
    found = entries(["llama3-8b", "qwen3-8b", "gemma3-27b-local"], [1, 8], [128, 16])
    assert [entry.label for entry in found if entry.page_size == 16] == [
        "llama3-8b / 1, page 16",
        "llama3-8b / 8, page 16",
        "gemma3-27b-local / 1, page 16",
        "gemma3-27b-local / 8, page 16",
    ]
    assert found[1].shape == TunedShape(4, 1, 128, 128, "bfloat16", "bfloat16", None, None)
    assert found[2].shape.sliding_window == found[2].mask.sliding_window == 1024


def test_unknown_models_and_splits() -> None:
    with pytest.raises(ValueError, match=r"expected a model out of \['gemma2.*, got 'llama9'"):
        entries(["llama9"], [1], [128])
    with pytest.raises(ValueError, match=r"expected shards that divide 32 query heads .*, got 3"):
        entries(["llama3-8b"], [3], [128])[0].shape  # noqa: B018


def test_candidates_of_parts_go_side_by_side() -> None:
    assert list(candidates([{"a": 1}, {"a": 2}], [{"b": 3}])) == [{}, {"a": 1, "b": 3}, {"a": 2}]


def test_results_are_kept_and_failures_tried_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "results.json", []

    def measure(result: Record) -> Record:
        calls.append(result)
        return result

    assert Log(path).of("one", lambda: measure(record(1.0))) == record(1.0)
    assert Log(path).of("two", lambda: measure({"error": "died"})) == {"error": "died"}
    assert Log(path).of("one", lambda: measure(record(2.0))) == record(1.0)
    assert Log(path).of("two", lambda: measure(record(3.0))) == record(3.0)
    assert len(calls) == 3
    assert Log(None).of("one", lambda: measure(record(2.0))) == record(2.0)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [((100, 98, 120), 512), ((100, 97, 120), 256), ((100, 90, 90), 256), ((100, None, 50), 1024), ((None, 1, 1), 512)],
)
def test_the_margin_decides(costs: tuple[float | None, ...], expected: int) -> None:
    """The first of least cost, where it saves 3 %; what has no cost is neither chosen nor beaten."""
    sizes = (512, 256, 1024)
    (choice,) = choose(ENTRY, [record(cost, decode_block=size) for cost, size in zip(costs, sizes, strict=True)], 0.03)
    assert choice.best["sizes"] == {"decode_block": expected}
    assert choice.is_tuned == (expected != 512)
    assert choice.row.endswith("kept" if expected == 512 else "%")


@pytest.mark.parametrize(("at_two", "expected"), [(143, 512), (144, 256)])
def test_what_loses_the_margin_at_another_latency_is_not_taken(at_two: int, expected: int) -> None:
    formula, best, second = record(100, decode_block=256), record(80, decode_block=512), record(95, decode_block=1024)
    for one, cost in ((formula, 139), (best, at_two), (second, 150)):
        one["decode"]["cost_at_latencies"] = {"1 us": one["decode"]["cost"], "2 us": cost}
    (choice,) = choose(ENTRY, [formula, best, second], 0.03)
    assert choice.best["sizes"] == {"decode_block": expected}


def test_what_does_not_compile_is_passed_over() -> None:
    assert choose(ENTRY, [{"error": "died"}, record(1.0)], 0.03) == []
    (choice,) = choose(ENTRY, [record(100.0), {"error": "died"}, record(50.0, decode_block=128)], 0.03)
    assert choice.gain == 0.5


def test_entries_are_replaced_and_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "v6e.json"
    other = entries(["llama3-8b"], [8], [128])[0]

    def write(entry: Entry, *best: tuple[str, Record]) -> dict[str, object]:
        start = record(100.0)["decode"]
        choices = [Choice(entry, part, start, found or start) for part, found in best]
        write_tuned(path, "static score", Tuning._fields, choices)
        read = read_table(path, OP, TunedShape._fields, Tuning._fields).entries if path.exists() else {}
        return {shape["num_q_heads"]: sizes for shape, sizes in read.values()}

    tuned = {"sizes": {"decode_block": 256}, "cost": 50.0}
    tiles = {"sizes": {"queries": 64}, "cost": 50.0}
    assert write(ENTRY, ("decode", {})) == {}
    assert not path.exists()
    assert write(ENTRY, ("decode", tuned), ("tiles", tiles)) == {32: {"decode_block": 256, "queries": 64}}
    assert write(other, ("decode", tuned)) == {32: {"decode_block": 256, "queries": 64}, 4: {"decode_block": 256}}
    assert write(ENTRY, ("decode", {}), ("tiles", {})) == {4: {"decode_block": 256}}
    assert write(other, ("decode", {})) == {}


def test_candidates_for_tpu_can_be_compiled() -> None:
    """The formula first, no size twice, and every setting is one of the case's."""
    found = list(tune_tpu.candidates_of(ENTRY))
    assert found[0] == {}
    assert {"queries": 64, "tile_block": 1024} in [{k: v for k, v in x.items() if k != "decode_block"} for x in found]
    assert len({tuple(sizes.items()) for sizes in found}) == len(found)
    for sizes in found:
        case = case_of("tpu", OP, ENTRY.settings(sizes))
        assert (case.heads, case.kv_heads, case.page, case.tuned) == (32, 8, 128, 0)
        assert case.decode_block == sizes.get("decode_block", 0)
    (few,) = entries(["llama3-70b"], [1], [512])
    assert all(sizes.get("decode_block", 512) >= 512 for sizes in tune_tpu.candidates_of(few))
    (one_head,) = entries(["llama3-70b"], [8], [16])
    assert {sizes.get("decode_block") for sizes in tune_tpu.candidates_of(one_head)} == {None, 256, 512, 1024, 2048}


def fake_kernel(queries: int, block: int, bundles: int) -> Kernel:
    blocks = [Loop(0, count, 0, True, {"VALU": count}, ()) for count in (bundles, 2 * bundles)]
    trip = Loop(0, 9000, 0, True, {}, tuple(blocks))
    return Kernel(f"rpa_q{queries}_b{block}_p128_t1", Loop(0, 9999, 0, True, {}, (trip,)))


def test_tuning_writes_what_compiles_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiles of 64 queries take as many bundles as tiles of 32, so half the time; larger ones do not compile."""

    def compile_and_dump(chip: str, op: str, settings: list[str], **_: object) -> Compilation:
        given = dict(setting.split("=") for setting in settings)
        queries = int(given.get("queries", 32))
        if int(given.get("tile_block", 512)) > 512:
            raise CompilationError("exceeds VMEM")
        kernels = [fake_kernel(1, 512, 10), fake_kernel(queries, 512, 9000)]
        return Compilation({"token_bytes": 4096}, kernels)

    monkeypatch.setattr(tune_tpu, "compile_and_dump", compile_and_dump)
    path, figures = tmp_path / "v6e.json", tmp_path / "figures.json"
    arguments = ["v6e", "--model=llama3-8b", "--tp=1", "--page=128", f"--out={path}", f"--json={figures}"]
    assert tune_tpu.main(arguments) == 0
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry == {"shape": ENTRY.shape._asdict(), "sizes": {"queries": 64, "tile_block": 512}}
    said = capsys.readouterr()
    assert "tile_block=1024" in said.err
    assert "exceeds VMEM" in said.err
    decode, tiles = json.loads(figures.read_text())
    assert (decode["part"], decode["gain"]) == ("decode", 0.0)
    assert 0.4 < tiles["gain"] < 0.6
    costs = decode["formula"]["cost_at_latencies"]
    assert costs["0.5 us"] < costs["1 us"] == decode["formula"]["cost"] < costs["2 us"]


def test_a_formula_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compile_and_dump(*_: object, **__: object) -> Compilation:
        raise CompilationError("died")

    monkeypatch.setattr(tune_tpu, "compile_and_dump", compile_and_dump)
    path = tmp_path / "v6e.json"
    assert tune_tpu.main(["v6e", "--model=llama3-8b", "--tp=1", "--page=128", f"--out={path}"]) == 1
    assert not path.exists()
