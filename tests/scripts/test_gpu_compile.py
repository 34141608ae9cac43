"""scripts/gpu_compile.py: what it reads off the compiler's dumps, its settings, its complaints. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from scripts import gpu_compile
from scripts.gpu_aot.compile_one import parse_case
from scripts.gpu_aot.operations import OPERATIONS, AttentionCase, with_model_shape
from scripts.gpu_aot.resources import Usage, count_instructions, parse_ptxas, parse_shared_memory

LINKED = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_kernel
ptxas         .     264 bytes stack frame, 512 bytes spill stores, 540 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
ptxas info    : Compile time = 878.518 ms
info    : 0 bytes gmem
info    : used 168 registers, used 16 barriers, 0 stack, 1025 bytes smem, 1088 bytes cmem[0], 0 bytes lmem
"""
ALONE = """
ptxas info    : Compiling entry function 'first' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
SASS = """
   -:-:1:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   3:-:-:Y:01        /*00f0*/               @P0 IADD3 R3, P2, R160.reuse, 0x30, RZ
   2:-:-:Y:01        /*0110*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT
   2:-:-:Y:01        /*0120*/               @!P1 MUFU.EX2 R3, R4
        /*1130*/              @!UPT UTMALDG.4D [UR8], [UR6] ;
        /*1140*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
"""


def test_reads_registers_and_spills() -> None:
    assert parse_ptxas(LINKED) == [Usage("decode_kernel", 168, 512, 540, True)]
    assert parse_ptxas(ALONE) == [Usage("first", 38, 0, 0, False), Usage("second", 255, 8, 4, False)]
    assert parse_ptxas("") == []


def test_reads_shared_memory() -> None:
    assert parse_shared_memory("Resources(smem_scratch_bytes=183296, tmem_scratch_cols=0)") == 183296
    assert parse_shared_memory("") is None


def test_counts_instructions() -> None:
    """By their first word, predicates and suffixes apart."""
    counts = count_instructions(SASS)
    assert {name: n for name, n in counts.items() if n} == {"HGMMA": 1, "MUFU": 1, "UTMALDG": 1, "USETMAXREG": 1}


def test_settings_of_a_case() -> None:
    case = parse_case(AttentionCase, ["head_dim=64", "dtype=int8", "soft_cap=30"])
    assert (case.head_dim, case.dtype, case.soft_cap) == (64, "int8", 30.0)
    with pytest.raises(ValueError, match=r"expected a setting out of .*'head_dim'.*, got 'heed_dim=1'"):
        parse_case(AttentionCase, ["heed_dim=1"])
    local = with_model_shape(AttentionCase(shape="gpt-oss-120b-local", page=64))
    assert (local.heads, local.head_dim, local.window, local.page) == (64, 64, 128, 64)
    with pytest.raises(ValueError, match=r"expected a shape out of .*, got 'llama9'"):
        with_model_shape(AttentionCase(shape="llama9"))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_traces(op: str) -> None:
    """The call accepts the arguments that are built for it: shapes of the result, no kernel is compiled."""
    import jax

    case_type, build = OPERATIONS[op]
    call, arguments = build(case_type())
    assert jax.eval_shape(call, *arguments) is not None


def record(**changes: object) -> dict[str, object]:
    usage = dataclasses.asdict(Usage("k_mosaic_gpu_kernel", 168, 0, 0, False))
    return {"case": "decode", "how": "alone", "shared_bytes": 1000, **usage, "sass": {"HGMMA": 2, "LDL": 0}, **changes}


def test_complaints() -> None:
    assert gpu_compile.problems(record()) == []
    assert "expected no spills, got 12 bytes" in gpu_compile.problems(record(spill_store_bytes=12))[0]
    assert "expected at most 232448 bytes shared" in gpu_compile.problems(record(shared_bytes=300_000))[0]


def test_the_table_leaves_out_what_nobody_uses() -> None:
    header, row = gpu_compile.table([record()]).splitlines()
    assert header.split()[-1] == "HGMMA"
    assert row.split() == ["decode", "k", "alone", "168", "0", "0", "1000", "2"]


def test_a_failed_compilation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_CUDA_PYTHON", sys.executable)
    with pytest.raises(RuntimeError, match=r"decode heed=1: .*expected a setting out of"):
        gpu_compile.compile_op("h100", "decode", ["heed=1"])
