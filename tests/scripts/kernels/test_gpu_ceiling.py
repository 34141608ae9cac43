"""scripts/lab/gpu/ceiling.py: loops and their cycles, read off a disassembly that is written here."""

from __future__ import annotations

import pytest

from scripts.gpu_compile import ceilings
from scripts.lab.gpu.ceiling import LATENCY, Ceiling, loops_of
from scripts.lab.gpu.target import CARDS

H100 = CARDS["h100"]
SCORES = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT"
VALUES = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24"


def sass(*loops: list[str]) -> str:
    """Loops one after the other, in an outer loop; each preceded by a spin that waits for a barrier."""
    lines = [".L_x_0:"]
    for number, loop in enumerate(loops, 1):
        spin = [f".L_x_9{number}:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR7], R9", f"@!P1 BRA `(.L_x_9{number})"]
        lines += [*spin, f".L_x_{number}:", *loop, f"@P1 BRA `(.L_x_{number})"]
    lines.append("@P0 BRA `(.L_x_0)")
    at = iter(range(0, 1 << 20, 16))
    return "\n".join(x if x.startswith(".") else f"   -:-:-:Y:01   /*{next(at):04x}*/   {x} ;" for x in lines)


WHOLE = [SCORES, "MUFU.EX2 R3, R4", *["FADD R1, R2, R3"] * 300, VALUES]
FETCH = ["BAR.SYNC 0x1", "UTMALDG.4D [UR8], [UR6]"]


def test_loops_are_the_innermost_that_multiply_or_copy() -> None:
    found = loops_of(sass(WHOLE, ["FADD R1, R2, R3"], FETCH))
    assert [(len(loop.instructions), len(loop.products)) for loop in found] == [(304, 2), (3, 0)]
    assert found[0].products == [(64, True), (128, False)]


def test_warps_that_share_copies_execute_a_quarter() -> None:
    copies = ["UTMALDG.4D [UR8], [UR6]", *["IADD3 R3, R4, R5"] * 4] * 8
    (shared,), (whole,) = loops_of(sass(copies)), loops_of(sass(["BAR.SYNC 0x1"] * 8 + copies))
    assert shared.executed == 41 - 0.75 * 35
    assert whole.executed == 49


def test_cycles_of_a_prefill_block() -> None:
    """By hand: two warpgroups, one that fetches; the shortest loop with products counts."""
    masked = [*WHOLE, *["FSEL R1, R2, R3, P0"] * 50]
    found = Ceiling.of("rpa_prefill_p16_b64_kernel", sass(WHOLE, masked, FETCH), H100, page_bytes=2)
    assert found is not None
    assert found.tensor == 2 * (64 + 128) / 2
    assert found.issue == 2 * 304 + 3
    assert found.exp == 2 * 8
    assert found.num_bytes == 32 * (64 + 128)
    assert found.shared == (2 * (32 * 64 + 2048 + 32 * 128) + 32 * 192) / 128
    assert (found.memory, found.binds) == (0, "issue")
    assert found.by_turns == 96 + 304 + LATENCY
    assert found.in_step == 192 + 2 * 304 + LATENCY
    flops = 2 * 2 * 64 * 16 * (64 + 128)
    assert found.tflops(found.in_step, H100) == pytest.approx(flops / found.in_step * 1.7e9 * 132 / 1e12)


def test_latents_are_read_once_and_scored_by_one_warpgroup() -> None:
    """The loop with the most products runs in one warpgroup, the other in two."""
    add = ["HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24"]
    found = Ceiling.of("mla_p64_t1_kernel", sass([SCORES] * 3, add), H100, page_bytes=1)
    assert found is not None
    assert found.tensor == 3 * 32 + 2 * 128
    assert found.num_bytes == 3 * 32 * 64 // 2
    assert found.binds == "tensor"
    assert found.memory == pytest.approx(found.num_bytes / (H100.bytes_per_s / 132 / 1.7e9))


def test_other_kernels_have_none() -> None:
    assert Ceiling.of("rpa_merge_pieces_kernel", sass(FETCH), H100, 2) is None
    assert Ceiling.of("rpa_decode_p16_kernel", sass(FETCH), H100, 2) is None


def test_the_table() -> None:
    found = Ceiling.of("rpa_decode_p16", sass(WHOLE), H100, 2)
    assert found is not None
    record = {"case": "attention", "kernel": "rpa_decode_p16", "how": "alone", "ceiling": found.as_record(H100)}
    head, row = ceilings([{"module": "attention"}, {**record, "ceiling": None}, record]).splitlines()
    assert "TFLOP/s by turns" in head
    assert row.split()[:4] == ["attention", "rpa_decode_p16", "alone", "304"]
    assert len(ceilings([]).splitlines()) == 1
