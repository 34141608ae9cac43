"""Headline figures: what fails, what is told, and that the committed ones are whole. Nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts import tpu_headlines
from scripts.lab.compiled import case_of
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.compiler import Compilation, CompilationError
from scripts.lab.tpu.headlines import Headline, Outcome, measure, read, write
from scripts.lab.tpu.libtpu import Release
from tests.scripts.tpu.tpu_listing import PRODUCT, START, WAIT, kernel, loop

BLOCK = loop(START, WAIT, PRODUCT, 592)  # 600 bundles
DECODE = kernel("rpa_q1_b1024_p128_t1_n4", loop(95, BLOCK, loop(WAIT, PRODUCT, 793)))  # 100 an item, 800 a masked block
TILES = kernel("rpa_q32_b512_p128_t1", loop(95, BLOCK, loop(WAIT, PRODUCT, 793)))
FOUND = Compilation({"token_bytes": 4096}, [TILES, DECODE])


def headline(unit: str, tokens: int, figure: float = 0.0, bar: float | None = None) -> Headline:
    return Headline(
        "decode", "v7x", "ragged_paged_attention", ("tokens=1",), unit, tokens, figure, bar, {"rpa v3": 700.0}
    )


@pytest.mark.parametrize(
    ("unit", "tokens", "expected"),
    [
        ("bundles", 512, 300),  # a full block of 1,024
        ("us a step", 1024, 1.14),  # 4 MiB
        ("us", 256, round(max(900 / 2.2e3, (1 + 0.28417 + 900 / 2.2e3) / 4) + 0.005, 2)),
        ("of HBM", 8192, 1.0),
        ("k bundles", 32, 1),  # a tile: 100 and a masked block of 800, rounded up
        ("bytes", 1, 4096),
    ],
)
def test_figures_of_a_compilation(unit: str, tokens: int, expected: float) -> None:
    assert measure(headline(unit, tokens), FOUND).figure == expected


def test_a_figure_is_rounded_up() -> None:
    odd = Compilation(FOUND.memory, [kernel("rpa_q1_b1024_p128_t1", loop(9, loop(PRODUCT, 595), loop(PRODUCT)))])
    assert measure(headline("bundles", 512), odd).figure == 301


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"decode: expected a kernel of tiles, got \['rpa_q1_b1024_p128_t1_n4'\]"):
        measure(headline("k bundles", 2048), Compilation(FOUND.memory, [DECODE]))


def test_what_exceeds_its_figure_fails() -> None:
    at = headline("bundles", 512, 626.0, 640.0)
    assert not Outcome(at, 626.0).fails
    assert not Outcome(at, 600.0).fails
    assert Outcome(at, 627.0).fails
    cells = ("v7x", "decode", "bundles", "627", "626", "640", "rpa v3 700", "exceeds the committed figure")
    assert Outcome(at, 627.0).row == cells
    assert Outcome(at, 641.0).row[-1] == "exceeds the committed figure, bar not met"
    assert Outcome(replace(at, bar=None), 600.0).row[-3:] == ("-", "rpa v3 700", "better")


def test_the_committed_figures_are_whole() -> None:
    """Cases of known settings and chips, no two alike; figures with the digits that are told."""
    version, headlines = read()
    assert version.startswith("0.0.")
    assert len({(head.case, head.unit, head.tokens) for head in headlines}) == len(headlines)
    for head in headlines:
        assert head.chip in CHIPS
        case_of("tpu", head.op, list(head.settings))
        assert float(head.text(head.figure).replace(",", "")) == head.figure


@pytest.mark.parametrize(("excess", "status"), [(0, 0), (-1, 0), (1, 1)])
def test_a_run(
    excess: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal cases are compiled once; a figure above the committed one fails; an update commits what came out."""
    asked: list[list[str]] = []

    def compile_and_dump(chip: str, op: str, settings: list[str], **_: object) -> Compilation:
        asked.append(settings)
        return FOUND

    monkeypatch.setattr(tpu_headlines, "compile_and_dump", compile_and_dump)
    monkeypatch.setattr(tpu_headlines, "release", Release)
    path = tmp_path / "headlines.json"
    write(path, "0.0.51", [Outcome(headline("bundles", 512), 300.0 - excess), Outcome(headline("bytes", 1), 4096.0)])
    arguments = [f"--file={path}", "--libtpu=0.0.52", "--jobs=1"]
    assert tpu_headlines.main(arguments) == status
    assert asked == [["tokens=1"]]
    assert "libtpu 0.0.52; committed figures: 0.0.51" in capsys.readouterr().out
    assert tpu_headlines.main([*arguments, "--update"]) == 0
    assert read(path) == ("0.0.52", [headline("bundles", 512, 300.0), headline("bytes", 1, 4096.0)])
    assert tpu_headlines.main(arguments) == 0


@pytest.mark.parametrize("error", [CompilationError("died"), ValueError("cannot be read")])
def test_a_case_that_does_not_compile_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: object, **__: object) -> Compilation:
        raise error

    monkeypatch.setattr(tpu_headlines, "compile_and_dump", raises)
    monkeypatch.setattr(tpu_headlines, "release", Release)
    path = tmp_path / "headlines.json"
    write(path, "0.0.51", [Outcome(headline("bundles", 512), 300.0)])
    before = path.read_text()
    for more in ([], ["--update"]):
        assert tpu_headlines.main([f"--file={path}", "--libtpu=0.0.52", *more]) == 1
    assert str(error) in capsys.readouterr().err
    assert path.read_text() == before
