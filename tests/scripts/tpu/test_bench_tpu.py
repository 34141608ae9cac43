"""scripts/bench_tpu.py without a TPU: the dry run, what is picked, the chip table, upstream's layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pallas_kernels.cases.case import Step, of_step
from pallas_kernels.cases.find import case_types
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from pallas_kernels.ragged_paged_attention.oracle import unpacked
from pallas_kernels.ragged_paged_attention.shapes import AttentionShape
from scripts import bench_tpu
from scripts.lab.bench import rivals_tpu


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert bench_tpu.main(["--dry-run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_dry_run_by_the_reference_has_sizes_and_no_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tpu.json"
    picked = ["--shape", "llama3-8b", "--page", "16", "--op", "merge_states", "--op", "ragged_paged_attention"]
    lines = dry_run(capsys, "--by-reference", *picked, "--kind", "decode", "--kind", "2 parts", "--json", str(path))
    assert lines[0] == "no tpu here: a dry run at small sizes, without times"
    found = json.loads(path.read_text())
    assert found["about"]["device"] is None
    assert [row["op"] for row in found["rows"]] == ["merge_states", "ragged_paged_attention"]
    assert len(lines) == 2 + 2
    for row in found["rows"]:
        assert row["by"] == "reference"
        assert row["median_us"] is row["bandwidth_share"] is row["flops_share"] is None
        assert row["excess"] <= 1
    decode = found["rows"][1]
    assert decode["num_bytes"] == 64 * 4096 * 8 * 2 * 128 * 2 + 64 * 32 * 2 * 128 * 2
    assert decode["flops"] == 64 * 4096 * 32 * 4 * 128


def test_every_op_has_cases_of_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_tpu.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == set(case_types())


def test_a_dry_run_interprets_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "--op", "kv_write", "--shape", "llama3-8b", "--page", "16", "--kind", "decode")
    assert len(lines) == 3
    assert "kernel, interpreted" in lines[2]
    assert lines[2].endswith(" equal")


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_tpu.main(["--list", "--op", "page_ops", "--shape", "llama3-8b", "--kind", "copy"]) == 0
    names = [f"page_ops/copy/llama3-8b/64 pages/page {page}/bfloat16" for page in (16, 128)]
    assert capsys.readouterr().out.splitlines() == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "none"], "no case is of \\['none'\\] and any kind; shapes: .*'llama3-8b'"),
        (["--repeats", "0"], "expected --repeats and --shards of at least 1 and no negative size"),
        (["--json", "/nowhere/x.json"], "argument --json: expected a file in a folder that exists"),
        (["--op", "none"], "argument --op: invalid choice: 'none'"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_tpu.main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_the_chip_is_found_by_what_jax_calls_it() -> None:
    peaks = bench_tpu.peaks(SimpleNamespace(device_kind="TPU v6 lite"))
    assert (peaks.bytes_per_s, peaks.flops_per_s) == (1.64e12, 918e12)
    assert peaks.source == "specification of v6e"
    with pytest.raises(ValueError, match=r"expected a chip out of \[.*\], got 'TPU v1': add it to chips.py"):
        bench_tpu.peaks(SimpleNamespace(device_kind="TPU v1"))


def test_peaks_are_those_of_the_matrix_units() -> None:
    """Units of the chip times width squared, a multiplication and an addition each, times the clock."""
    units = {"v5e": (4, 128), "v5p": (8, 128), "v6e": (4, 256), "v7x": (4, 256)}
    for name, (count, width) in units.items():
        chip = bench_tpu.CHIPS[name]
        assert chip.bf16_flops_per_s == pytest.approx(2 * count * width**2 * chip.clock_hz, rel=0.01)


def test_upstream_gets_k_and_v_in_its_own_layout() -> None:
    shape = AttentionShape("x", "x", 6, 3, 16)
    case = of_step(AttentionCase, shape, "decode", Step(small=True), platform="tpu", page=8)
    pages = case.arguments(0).pages
    k, v = unpacked(tuple(np.asarray(p) for p in pages), 3, 16)
    found = rivals_tpu.split_pages(case, pages)
    np.testing.assert_array_equal(np.asarray(found[0]).astype(np.float64).transpose(1, 2, 0, 3), k)
    np.testing.assert_array_equal(np.asarray(found[1]).astype(np.float64).transpose(1, 2, 0, 3), v)


@pytest.mark.parametrize(("columns", "page", "block"), [(256, 16, 32), (3, 128, 3), (5, 128, 1), (7, 512, 1)])
def test_a_block_of_upstream_divides_the_table(columns: int, page: int, block: int) -> None:
    assert rivals_tpu.compute_block_pages(columns, page) == block
