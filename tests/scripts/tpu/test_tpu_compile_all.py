"""The script that compiles everything: its cases, what it tells and remembers, and a small real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pallas_kernels.ragged_paged_attention.shapes import SHAPES
from scripts import tpu_compile_all
from scripts.lab.compiled import case_of, compiled_types
from scripts.lab.tpu import everything
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.compiler import Compilation, CompilationError
from scripts.lab.tpu.everything import Line, Result, compile_all, compile_case, load, losses, save
from scripts.lab.tpu.libtpu import LibtpuError, Release
from scripts.lab.tpu.shape_cases import ShapeCase, shape_cases, subset
from scripts.lab.tpu.workers import Workers
from tests.scripts.needs_libtpu import needs_libtpu

CASE = ShapeCase("kv_write", "llama3-8b / 1", ("kv_heads=8",))
IN_PLACE = {"donated_bytes": 0, "alias_bytes": 0, "temp_bytes": 0}
MEMORY = {"kernels": {"kv_write": {"vmem_bytes": 1 << 20, "smem_bytes": 4096}}, "token_bytes": None, **IN_PLACE}


def test_every_op_has_cases_of_its_own_settings() -> None:
    """No setting is unknown, none is compiled twice, and what an op has cases for can be compiled."""
    cases = shape_cases()
    assert {case.op for case in cases} == set(compiled_types("tpu"))
    assert len({(case.op, case.settings) for case in cases}) == len(cases)
    for case in cases:
        case_of("tpu", case.op, list(case.settings))


def test_attention_is_compiled_at_every_shape_and_split() -> None:
    """And where a shard has one KV head in fp8, too, of which two tokens share words."""
    cases = [case_of("tpu", c.op, list(c.settings)) for c in shape_cases(["ragged_paged_attention"])]
    found = [
        (c.dtype, c.heads, c.kv_heads, c.head_dim, c.window or None, c.chunk or None, c.soft_cap or None, bool(c.sinks))
        for c in cases
    ]
    for shape in SHAPES:
        masks = (shape.sliding_window, shape.attention_chunk_size, shape.soft_cap, shape.sinks)
        for num_shards in (1, 2, 4, 8):
            sizes = (*shape.per_shard(num_shards), shape.head_dim, *masks)
            assert found.count(("bfloat16", *sizes)) == 1
            assert found.count(("float8_e4m3fn", *sizes)) == (sizes[1] == 1)


def test_settings_may_be_added_to_every_case() -> None:
    assert {case.settings[-1] for case in shape_cases(["page_ops"], ("page=16",))} == {"page=16"}


def test_the_subset_has_every_op_on_every_chip() -> None:
    chips = tuple(CHIPS)
    picked = subset(shape_cases(), chips)
    assert {(chip, case.op) for chip, case in picked} == {(chip, op) for chip in chips for op in compiled_types("tpu")}
    assert len(picked) == (len(chips) + 1) * len(compiled_types("tpu"))
    assert [case.op for _, case in picked if case.label == "in slabs"] == list(compiled_types("tpu"))


class Compilers:
    """Stand-ins of both compilers, which give `memory` or fail with it; `asked`: which of them were called."""

    def __init__(self, memory: dict | str) -> None:
        self.memory = memory
        self.asked: list[str] = []

    def __call__(self, *_: object, **options: object) -> Compilation:
        self.asked.append("with dumps" if options else "without")
        if isinstance(self.memory, str):
            raise CompilationError(self.memory)
        return Compilation(self.memory, [])


def answer(monkeypatch: pytest.MonkeyPatch, memory: dict | str) -> list[str]:
    """All compilations give `memory`, or fail with it; which compilers were asked."""
    compilers = Compilers(memory)
    monkeypatch.setattr(everything, "compile_and_dump", compilers)
    monkeypatch.setattr(everything.Workers, "compile", lambda _, *work: compilers(*work))
    return compilers.asked


def test_a_dump_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, "no end after 1 s")
    results: list[Result] = []
    compile_all([("v6e", CASE)], libtpu=Release("0.0.52"), jobs=1, dumps=True, timeout_s=1, on_result=results.append)
    assert asked == ["with dumps", "without"]
    assert results[0].error == "no end after 1 s"
    assert "does not compile" in results[0].rows[0]


def test_too_much_memory_is_a_failure() -> None:
    compilers = [Compilers({"kernels": {"kv_write": {"vmem_bytes": 65 << 20, "smem_bytes": 0}}, **IN_PLACE})]
    assert compile_case("0.0.52", "v6e", CASE, compilers).error is None
    error = compile_case("0.0.52", "v7x", CASE, compilers).error
    assert error == "kv_write: expected at most 67108864 bytes of VMEM, got 68157440"


@pytest.mark.parametrize(
    ("alias_bytes", "temp_bytes", "error"),
    [
        (100, 99, None),
        (99, 0, "expected 100 bytes updated in place, got 99"),
        (100, 100, "expected less temporary bytes than the 100 of pages, got 100"),
    ],
)
def test_pages_that_are_copied_are_a_failure(alias_bytes: int, temp_bytes: int, error: str | None) -> None:
    memory = {"kernels": {}, "donated_bytes": 100, "alias_bytes": alias_bytes, "temp_bytes": temp_bytes}
    assert compile_case("0.0.52", "v6e", CASE, [Compilers(memory)]).error == error


def test_results_are_saved_and_loaded(tmp_path: Path) -> None:
    line = Line("kv_write", "all", None, 4096, 51, 0, None)
    results = [Result("0.0.52", "v6e", CASE, 1.5, (line,)), Result("0.0.51", "v7x", CASE, 2.5, error="died")]
    save(tmp_path / "all.json", results)
    assert load(tmp_path / "all.json") == results
    assert load(tmp_path / "none.json") == []


def results(libtpu: str, *bundles: int | None) -> list[Result]:
    """Of one case: a line for each count."""
    lines = (Line("kernel", f"block {i}", None, 0, count, 0, None) for i, count in enumerate(bundles))
    return [Result(libtpu, "v6e", CASE, 1.0, tuple(lines))]


def test_a_loss_of_more_than_the_margin_is_told() -> None:
    """Of each kernel and block that both have; a gain is none, nor what one of them was not dumped or compiled for."""
    assert losses(results("0.0.52", 110, 50, None, 9), results("0.0.51", 100, 100, 10), 0.1) == []
    assert losses(results("0.0.52", 110, 111), results("0.0.51", 100, 100), 0.1) == [
        "v6e kv_write kv_heads=8 kernel block 1: 111 bundles with libtpu 0.0.52, 100 with 0.0.51 (+11%)"
    ]
    assert losses(results("0.0.52", 200), [Result("0.0.51", "v6e", CASE, 1.0, error="died")], 0.1) == []


def test_two_releases_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first against the others; the exit status tells of a loss, and the margin can be set."""
    counts = {"0.0.52": 130, "0.0.51": 100, "0.0.50": 125}

    def compile_all(work: list, *, libtpu: Release, on_result: Callable[[Result], object], **_: object) -> None:
        for chip, case in work:
            line = Line("kv_write", "all", None, 0, counts[libtpu.version], 0, None)
            on_result(Result(libtpu.version, chip, case, 1.0, (line,)))

    monkeypatch.setattr(tpu_compile_all, "compile_all", compile_all)
    monkeypatch.setattr(tpu_compile_all, "release", Release)
    arguments = ["--op", "latent_write", "--chip", "v6e", "--libtpu", "0.0.52", "--libtpu", "0.0.51"]
    assert tpu_compile_all.main([*arguments, "--libtpu", "0.0.50"]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lost: ")]
    assert len(told) == 1
    assert told[0].endswith("130 bundles with libtpu 0.0.52, 100 with 0.0.51 (+30%)")
    assert tpu_compile_all.main([*arguments, "--loss", "0.3"]) == 0


def test_a_release_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def release(word: str) -> Release:
        raise LibtpuError(f"no {word}")

    monkeypatch.setattr(tpu_compile_all, "release", release)
    with pytest.raises(SystemExit, match="2"):
        tpu_compile_all.main(["--libtpu", "newest"])
    assert "no newest" in capsys.readouterr().err


def test_a_run_goes_on_where_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures are tried again, what compiled is not; the exit status tells of failures."""
    monkeypatch.setattr(tpu_compile_all, "release", Release)
    arguments = ["--op", "latent_write", "--chip", "v6e", "--chip", "v7x", f"--results={tmp_path / 'all.json'}"]
    answer(monkeypatch, "died")
    assert tpu_compile_all.main(arguments) == 1
    assert "2 cases, 2 failed" in capsys.readouterr().out
    answer(monkeypatch, MEMORY)
    assert tpu_compile_all.main(arguments) == 0
    asked = answer(monkeypatch, "died")
    assert tpu_compile_all.main(arguments) == 0
    assert asked == []
    assert "2 cases, 2 of them known" in capsys.readouterr().out


@needs_libtpu
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One case with its dump, one without."""
    results = tmp_path / "all.json"
    for more in ([], ["--no-dump", "page=16"]):
        arguments = ["--op", "latent_write", "--chip", "v6e", "--jobs", "1", f"--results={results}", *more]
        assert tpu_compile_all.main(arguments) == 0
    dumped, other = load(results)
    assert "0 failed" in capsys.readouterr().out
    assert dumped.lines[0].kernel == "latent_write"
    assert dumped.lines[0].bundles
    assert other.lines[0].bundles is None


@needs_libtpu
def test_a_process_compiles_one_case_after_another() -> None:
    """A case that is refused costs only itself, one that does not end its process too."""
    with Workers(1, 120) as workers:
        first = workers.compile("v6e", "kv_write", ["page=16"])
        with pytest.raises(CompilationError, match="nothing"):
            workers.compile("v6e", "nothing", [])
        assert workers.compile("v7x", "kv_write", ["page=16"]).memory.keys() == first.memory.keys()
    assert first.memory["kernels"]["kv_write"]["smem_bytes"] > 0
    with Workers(1, 0.05) as workers, pytest.raises(CompilationError, match=r"no end after 0\.05 s"):
        workers.compile("v6e", "kv_write", ["page=16"])
