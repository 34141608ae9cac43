"""Reading the TPU compiler's dumps, on those of kv_write for v6e, and the score of attention kernels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from scripts import tpu_compile
from scripts.lab.tpu.bundles import Kernel, Loop, read_bundles, read_dumps, read_kernel, read_utilization
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.compile_one import vmem_bytes
from scripts.lab.tpu.compiler import CompilationError, compile_and_dump
from scripts.lab.tpu.score import BlockScore, block_scores, executed_bundles
from tests.scripts.needs_libtpu import needs_libtpu

DUMP = Path(__file__).parent / "tpu_dump"
LISTING = (DUMP / "1-kv_write.1-02-final_bundles.txt").read_text()
USE = (DUMP / "1-kv_write.1-00-final_hlo-static-per-bundle-utilization.txt").read_text()


def test_loops_of_a_dump() -> None:
    """kv_write starts all DMAs in one loop and waits in another; a loop ends after its branch's delay slots."""
    (kernel,) = read_dumps(DUMP, ".*write")
    assert kernel.name == "kv_write"
    assert (kernel.loop.first, kernel.loop.end, kernel.loop.num_dmas) == (0, 51, 2)
    start, wait = kernel.loop.inner
    assert (start.first, start.end, start.num_dmas, start.inner) == (0xE, 0x1F, 1, ())
    assert (wait.first, wait.end, wait.num_dmas, wait.inner) == (0x24, 0x2F, 0, ())
    assert kernel.loop.own_bundles == 51 - 17 - 11
    assert not kernel.loop.has_matmul
    assert kernel.loop.num_spills == 0
    assert start.bound == ("SALU", -(-sum(row["SALU"] for row in read_utilization(USE)[1][0xE:0x1F]) // 2))


def test_other_kernels_are_left_out() -> None:
    assert read_dumps(DUMP, "rpa_.*") == []


def test_utilization() -> None:
    counts, rows = read_utilization(USE)
    assert counts["VALU"] == 4
    assert counts["VLOAD:FILL"] == 3
    assert len(rows) == len(read_bundles(LISTING)) == 51


def test_dumps_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="kv_write: expected as many rows of use as bundles, got 50 and 51"):
        read_kernel("kv_write", LISTING, USE.rstrip().rpartition("\n")[0])
    with pytest.raises(ValueError, match="expected a branch back to the loop at bundle 14, got none"):
        read_kernel("kv_write", LISTING.replace("$region32 }", "$region99 }"), USE)


def loop(bundles: int, *inner: Loop, dmas: int = 0, matmul: bool = False) -> Loop:
    return Loop(0, bundles, dmas, matmul, {"VALU": bundles, "VSTORE:SPILL": 2 * bundles}, inner)


BLOCKS = [loop(600, matmul=True), loop(840, loop(20, dmas=4), loop(10, dmas=1), dmas=5, matmul=True)]


@pytest.mark.parametrize(("pages", "expected"), [(1, 820), (4, 830), (6, 850), (32, 970)])
def test_rolled_loops_count_their_trips(pages: int, expected: int) -> None:
    """Pages are started four at a time, the rest one by one."""
    assert executed_bundles(BLOCKS[1], pages, 1) == expected


def test_heads_that_are_not_unrolled() -> None:
    assert executed_bundles(loop(100, loop(70, matmul=True)), 4, head_trips=3) == 30 + 3 * 70


def test_scores() -> None:
    kernel = Kernel("rpa_q1_b512_p128_t1", loop(2000, loop(1900, loop(30), *BLOCKS, matmul=True), matmul=True))
    full, masked = block_scores(kernel, CHIPS["v6e"], token_bytes=4096)
    assert (full.kind, full.bundles, full.num_bytes, round(full.dma_cycles)) == ("full", 600, 2 << 20, 2238)
    assert (full.queries, full.block_tokens, full.bound, full.spill_bundles) == (1, 512, ("VALU", 600), 1200)
    assert (masked.kind, masked.bundles) == ("masked", 830)
    assert full.seconds(CHIPS["v6e"], 0) == full.dma_cycles / 1.75e9
    assert full.dma_share == pytest.approx(600 / 2238, rel=1e-3)
    assert dataclasses.replace(full, bundles=3000).seconds(CHIPS["v6e"], 0) == 3000 / 1.75e9


def test_scores_of_latent_attention() -> None:
    """A step of two blocks: what starts the next step, and the products; loops over pages by their trips."""
    start, full, masked = (
        Loop(first, end, 0, first > 200, {"VALU": end - first}, ())
        for first, end in ((120, 150), (300, 700), (700, 1200))
    )
    trip = Loop(100, 1500, 0, True, {}, (start, full, masked))
    scores = block_scores(
        Kernel("mla_q1_h16_u2_b512_p128", Loop(0, 1600, 0, True, {}, (trip,))), CHIPS["v6e"], token_bytes=1280
    )
    assert [(score.kind, score.bundles, score.block_tokens) for score in scores] == [
        ("full", 170 + 400, 1024),
        ("masked", 170 + 20 + 10 + 500, 1024),
    ]


def test_kernels_without_a_score() -> None:
    with pytest.raises(ValueError, match=r"expected a kernel called rpa_q\*_b\*_p\*_t\* or mla_.*, got 'kv_write'"):
        block_scores(Kernel("kv_write", loop(5)), CHIPS["v6e"], 1)
    with pytest.raises(ValueError, match=r"expected a kernel called rpa_.*, got 'rpa_q1_b512_p128'"):
        block_scores(Kernel("rpa_q1_b512_p128", loop(5)), CHIPS["v6e"], 1)
    with pytest.raises(ValueError, match="expected one or two loops over full blocks and one over masked ones, got 0"):
        block_scores(Kernel("rpa_q1_b512_p128_t1", loop(5, loop(3))), CHIPS["v6e"], 1)


def test_memory_of_a_module() -> None:
    text = (
        '  %copy.1 = s32[] copy(%a), backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0",'
        '"size":"7"}]}\n'
        '  %rpa_q1.3 = bf16[1,4] custom-call(%b, %c), custom_call_target="tpu_custom_call", backend_config={'
        '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4784128"}],"retry":{}}\n'
    )
    assert vmem_bytes(text) == {"rpa_q1": 4784128}


def test_a_process_that_fails_or_hangs() -> None:
    with pytest.raises(CompilationError, match=r"v6e nothing \[\]: exit status 1\n(.|\n)*expected an op out of"):
        compile_and_dump("v6e", "nothing", [], kernels=None)
    with pytest.raises(CompilationError, match=r"v6e kv_write \[\]: no end after 0.01 s"):
        compile_and_dump("v6e", "kv_write", [], kernels=None, timeout_s=0.01)


def test_a_line_of_the_table() -> None:
    score = BlockScore("rpa_q1_b512_p128_t1", "full", 1, 512, 655, 0, ("MATPUSH", 485), 2 << 20, 2238.0)
    cells = ["base", "rpa_q1_b512_p128_t1", "full", "655", "0", "MATPUSH", "485", "2238", "0.29", "4.0", "MiB", "0"]
    assert tpu_compile.row("base", "v6e", score).split() == [*cells, "1.28/1.33/1.83"]


@needs_libtpu
def test_what_does_not_compile_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu_compile.main(["v6e", "kv_write", "pages=3"]) == 1
    assert "expected a setting out of" in capsys.readouterr().err


@needs_libtpu
def test_compiles_without_a_tpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert tpu_compile.main(["v6e", "kv_write", "tokens=64", f"--json={path}"]) == 0
    assert "kv_write: VMEM" in capsys.readouterr().out
    assert json.loads(path.read_text())[0]["memory"]["kernels"]["kv_write"]["smem_bytes"] == 4 * (3 * 64 + 1)
