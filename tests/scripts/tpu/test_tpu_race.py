"""The race against kernels of a checkout: what is asked of it, what is told where one cannot be built."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import tpu_race
from scripts.lab.compiled import case_of
from scripts.lab.tpu.compiler import Compilation, CompilationError
from scripts.lab.tpu.libtpu import LibtpuError, Release
from scripts.lab.tpu.rivals import RIVALS, RivalCase, build, stand_in
from tests.scripts.tpu.tpu_listing import PRODUCT, START, WAIT, kernel, loop

KERNEL = "tpu_inference/kernels/ragged_paged_attention/v3"
OURS = [
    kernel("rpa_q1_b512_p128_t1_n4", loop(95, loop(START, WAIT, PRODUCT, 592), loop(WAIT, PRODUCT, 793))),
    kernel("rpa_q32_b512_p128_t1", loop(95, loop(START, WAIT, PRODUCT, 592), loop(WAIT, PRODUCT, 793))),
]
BATCHED = {"decode": "RPAd-p128-b8-q1-k256", "mixed": "RPAm-p128-b2-q256-k256"}


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A kernel that asks its package for what the real ones do."""
    folder = tmp_path / KERNEL
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(
        "from tpu_inference import envs, utils\n"
        "from tpu_inference.logger import init_logger\n"
        "init_logger(__name__).info('words')\n"
        "assert not envs.ANY_OPTION\n"
        "def get_kv_cache_shape(pages, page, heads, dim, dtype): return pages, page, heads, 2, dim\n"
        "def ragged_paged_attention(q, k, v, cache, *ints, **options): return options, len(ints)\n"
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "tpu_inference"]:
        del sys.modules[name]


def test_kernels_are_built_from_a_checkout(checkout: Path) -> None:
    """With stand-ins for the rest of their package, and our sizes in their arguments."""
    stand_in(checkout)
    call, (q, k, v, cache, *ints) = build("rpa_v3", RivalCase(heads=4, kv_heads=1, block_sizes=(1, 512, 1, 512)))
    assert (q.shape, k.shape, v.shape) == ((64, 4, 128), (64, 1, 128), (64, 1, 128))
    assert cache.shape == (4096, 128, 1, 2, 128)
    assert [array.shape for array in ints] == [(64,), (64 * 64,), (65,), (3,)]
    assert call(q, k, v, cache, *ints) == ({"sm_scale": 128**-0.5, "d_block_sizes": (1, 512, 1, 512)}, 4)
    call, _ = build("rpa_v3", RivalCase(mode="mixed", block_sizes=(32, 512, 32, 512)))
    assert call(q, k, v, cache)[0].keys() == {"sm_scale", "m_block_sizes", "p_block_sizes"}


def test_cases_are_those_of_both() -> None:
    for case in tpu_race.CASES.values():
        ours = case_of("tpu", tpu_race.OP, [f"{name}={value}" for name, value in case.sizes.items()])
        theirs = RivalCase(**case.sizes, mode=case.mode)  # type: ignore[arg-type]
        assert (ours.heads, ours.kv_heads, ours.dtype) == (theirs.heads, theirs.kv_heads, theirs.dtype)
        assert case.token_bytes == 2 * ours.kv_heads * ours.head_dim * (1 if "float8" in ours.dtype else 2)
        assert set(case.blocks) <= set(RIVALS)


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and batched compile; the others do not trace."""

    def run_and_read(command: list[str], what: str, **options: object) -> Compilation:
        if "batched" not in command:
            raise CompilationError(f"{what}: exit status 1\nTypeError: no such argument")
        mode = "decode" if options["kernels"] == "RPAd.*" else "mixed"
        return Compilation({}, [kernel(BATCHED[mode], loop(WAIT, PRODUCT, 793))])

    monkeypatch.setattr(tpu_race, "compile_and_dump", lambda *_, **__: Compilation({"token_bytes": 4096}, OURS))
    monkeypatch.setattr(tpu_race, "run_and_read", run_and_read)
    monkeypatch.setattr(tpu_race, "release", Release)


@pytest.mark.usefixtures("race")
def test_a_race(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(checkout), "--python=python", "--libtpu=0.0.52", "--rival=batched"]
    assert tpu_race.main([*arguments, "--case=decode", "--case=prefill"]) == 0
    said = capsys.readouterr().out
    assert "libtpu 0.0.52" in said
    ours, theirs = ([line for line in said.splitlines() if line.startswith(name)] for name in ("ours", "batched"))
    assert [line.split()[2] for line in ours[:2]] == ["8192", "256"]
    assert ours[0].split()[3] == f"{15 * 600 + 800 + 100:,}"
    assert theirs[0].split()[2:4] == ["8192", "3,200"]  # 800 bundles for a block of 256 of each of eight sequences
    assert theirs[1].split()[2:4] == ["256", "100"]
    assert len(ours) == len(theirs) == 3


@pytest.mark.usefixtures("race")
def test_a_kernel_that_does_not_trace_is_told(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu_race.main([str(checkout), "--python=python", "--libtpu=0.0.52", "--case=one head"]) == 1
    said = capsys.readouterr().out
    assert "rpa_v3: does not compile, or cannot be read: v7x rpa_v3: exit status 1\nTypeError: no such argument" in said
    assert "batched RPAd-p128-b8-q1-k256" in said


def test_a_folder_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tpu_race.main([str(tmp_path)])
    assert "expected a checkout of tpu-inference, found no tpu_inference/kernels in" in capsys.readouterr().err


def test_an_interpreter_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder of the jax's version beside the releases of libtpu; a pip that fails leaves none."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if command[2] == "venv":
            (tmp_path / "jax-0.11.0" / "bin").mkdir(parents=True, exist_ok=True)
            (tmp_path / "jax-0.11.0" / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, int(fails and command[2] == "pip"), "", "no network")

    monkeypatch.setattr(tpu_race.subprocess, "run", run)
    monkeypatch.setenv("KVJAX_LIBTPU", str(tmp_path / "libtpu"))
    fails = True
    with pytest.raises(LibtpuError, match=r"pip install .* failed:\nno network"):
        tpu_race.interpreter("0.11.0")
    fails = False
    python = tpu_race.interpreter("0.11.0")
    assert python == tpu_race.interpreter("0.11.0") == tmp_path / "jax-0.11.0" / "bin" / "python"
    assert [command[2] for command in asked] == ["venv", "pip"] * 2
    assert asked[-1][-2:] == ["jax==0.11.0", "jaxlib==0.11.0"]
