"""scripts/gpu_compile.py: what it reads off the compiler's dumps, settings, complaints; layers, where CUDA is."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from pallas_kernels.ragged_paged_attention.shapes import SHAPES
from scripts import gpu_compile, gpu_compile_all
from scripts.lab.compiled import compiled_types
from scripts.lab.gpu.launches import count_launches, launches_of
from scripts.lab.gpu.operations import LAYERS, case_of, operation_of
from scripts.lab.gpu.resources import Usage, count_copies, count_instructions, parse_ptxas, parse_shared_memory

OPS = [*compiled_types("gpu"), LAYERS]
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
    case = case_of("ragged_paged_attention", ["model=gpt-oss-120b-local", "dtype=int8", "soft_cap=30"])
    assert (case.heads, case.head_dim, case.window, case.page) == (64, 64, 128, 16)
    assert (case.dtype, case.soft_cap, case.tokens, case.write) == ("int8", 30.0, 2048, 1)
    assert case_of("layers", ["op=mla", "scan=0"]).scan == 0
    with pytest.raises(ValueError, match=r"expected settings out of .*'head_dim'.*, got \['heed_dim'\]"):
        case_of("layers", ["heed_dim=1"])
    with pytest.raises(ValueError, match=r"expected an op out of .*'kv_write'.*, got 'attend'"):
        case_of("attend", [])


@pytest.mark.parametrize("op", OPS)
def test_every_operation_traces(op: str) -> None:
    """The call accepts the arguments that are built for it: shapes of the result, no kernel is compiled."""
    import jax

    operation = operation_of(op, [])
    assert jax.eval_shape(operation.call, *operation.arguments) is not None


def record(**changes: object) -> dict[str, object]:
    usage = dataclasses.asdict(Usage("k_mosaic_gpu_kernel", 168, 0, 0, False))
    return {"case": "decode", "how": "alone", "shared_bytes": 1000, **usage, "sass": {"HGMMA": 2, "LDL": 0}, **changes}


def test_complaints() -> None:
    assert gpu_compile.problems(record()) == []
    assert "expected no spills, got 12 bytes" in gpu_compile.problems(record(spill_store_bytes=12))[0]
    assert "expected at most 232448 bytes shared" in gpu_compile.problems(record(shared_bytes=300_000))[0]


def test_complaints_about_modules() -> None:
    module = {"case": "kv_write", "module": "kv_write", "donated_bytes": 8, "aliased_bytes": 8, "copies": 0}
    module["temporary_bytes"] = 3
    assert gpu_compile.problems(module) == []
    assert "expected 8 bytes updated in place, got 4" in gpu_compile.problems({**module, "aliased_bytes": 4})[0]
    assert (
        "expected less temporary bytes than pages, got 8" in gpu_compile.problems({**module, "temporary_bytes": 8})[0]
    )
    assert "expected no copy of a page array, got 2" in gpu_compile.problems({**module, "copies": 2})[0]
    assert gpu_compile.report([module]).splitlines()[1].split() == ["kv_write", *"8830"]


def test_a_kernel_may_spill_what_is_committed_for_it() -> None:
    """By settings and the kernel's name: no bound of one kernel is another's."""
    settings = "dtype=int8 soft_cap=30"

    def allowed(op: str, kernel: str) -> int:
        return gpu_compile_all.allowed_spill_bytes(op, settings, {"kernel": kernel})

    op = "ragged_paged_attention"
    assert (allowed(op, "rpa_decode_p64"), allowed(op, "rpa_prefill_p64"), allowed(op, "merge")) == (16, 8, 0)
    assert gpu_compile_all.allowed_spill_bytes(op, "page=64", {"kernel": "rpa_decode_p64"}) == 0
    assert gpu_compile_all.allowed_spill_bytes("layers", "op=mla heads=8", {"kernel": "mla_p64"}) == 120


def test_counts_copies_of_one_shape() -> None:
    text = """
      %copy.1 = bf16[7,16]{1,0} copy(%a)
      %copy.2 = bf16[7,17]{1,0} copy(%a)
      %t = bf16[7,16]{1,0} transpose(%a), dimensions={0,1}
      %f = bf16[7,16]{1,0} fusion(%copy.1), kind=kLoop
    """
    assert count_copies(text, (7, 16)) == 2


MODULE = """
%fused_pad (p: bf16[8]) -> bf16[16] {
  ROOT %pad.1 = bf16[16]{0} pad(%p, %zero), padding=0_8, metadata={op_name="jit(call)/mixed/attend/pad"}
}
%sliced (p: bf16[2,8]) -> (bf16[8], f32[4,8]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %slice.1 = bf16[1,8]{1,0} slice(%p), slice={[0:1], [0:8]}, metadata={op_name="jit(call)/decode/slice"}
  %b.1 = bf16[8]{0} bitcast(%slice.1), metadata={op_name="jit(call)/decode/slice"}
  ROOT %k.1 = (bf16[8]{0}, f32[4,8]{1,0}) custom-call(%b.1), metadata={op_name="jit(call)/decode/attend/merge"}
}
%body.1 (carry: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %carry = (s32[], bf16[8]{0}) parameter(0)
  %gte.1 = bf16[8]{0} get-tuple-element(%carry), index=1
  %pad_fusion = bf16[16]{0} fusion(%gte.1), kind=kLoop, metadata={op_name="jit(call)/mixed/while/body/attend/pad"}
  %run = (bf16[8]{0}, f32[4,8]{1,0}) custom-call(%pad_fusion), metadata={op_name="jit(call)/mixed/while/body/attend/k"}
  %copy-start = (bf16[8]{0}, bf16[8]{0}) copy-start(%gte.1), metadata={op_name="jit(call)/mixed/while/body/write/c"}
  %copy-done = bf16[8]{0} copy-done(%copy-start), metadata={op_name="jit(call)/mixed/while/body/write/c"}
}
ENTRY %main.2 (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %sums = s32[4]{0} fusion(%x), kind=kInput, metadata={op_name="jit(call)/mixed/plan/reduce_sum"}
  %copy.1 = bf16[8]{0} copy(%x)
  %merge = (bf16[8]{0}, f32[4,8]{1,0}) fusion(%w), kind=kCustom, calls=%sliced, metadata={scheduling_name="merge"}
  ROOT %while = (s32[], bf16[8]{0}) while(%tuple), condition=%cond.1, body=%body.1
}
"""


def test_counts_launches_by_scope() -> None:
    """Of the entry and of loops, not inside of fusions; a copy that takes two instructions is one."""
    assert [launch.opcode for launch in launches_of(MODULE)] == [
        "fusion",
        "custom-call",
        "copy-start",
        "fusion",
        "copy",
        "fusion",
    ]
    assert count_launches(MODULE, "mixed", "attend") == 2
    assert (count_launches(MODULE, "mixed", "plan"), count_launches(MODULE, "decode", "plan")) == (1, 0)


def test_a_kernel_fused_with_the_slice_of_its_weights_is_counted() -> None:
    """XLA gives such a fusion no scope of its own; it stands where its result does."""
    assert count_launches(MODULE, "decode", "attend") == 1


def test_a_layer_of_many_launches_is_a_problem() -> None:
    module = {"case": "layers", "module": "layers", "donated_bytes": 8, "aliased_bytes": 8, "copies": 0}
    module["temporary_bytes"] = 3
    module |= {"temporary_bytes": 3, "launches_by_layer": {"decode": 3, "mixed": 5}, "launches_to_plan": {}}
    module["launches_to_plan"] = {"decode": 9, "mixed": 12}
    assert gpu_compile.problems(module) == ["layers: expected at most 4 launches a mixed layer, got 5"]
    assert gpu_compile.report([module]).splitlines()[-1].split() == ["layers", "mixed", "5", "12"]


@pytest.mark.skipif("KVJAX_CUDA_PYTHON" not in os.environ, reason="needs the Python that has CUDA's compilers")
@pytest.mark.parametrize("settings", gpu_compile_all.LAYER_CASES)
def test_a_layer_is_at_most_four_launches(settings: str) -> None:
    """Counted from the compiled module: dense, latent and sparse layers, unrolled and in a scan."""
    (module, *_) = gpu_compile.compile_op("h100", "layers", settings.split())
    assert gpu_compile.problems(module) == []
    assert all(count > 0 for count in module["launches_by_layer"].values())


def test_every_shape_is_compiled_once() -> None:
    """All layers of all models on all shards: what the kernels depend on, each once."""
    settings = [settings for op, settings in gpu_compile_all.cases(subset=False) if op == "ragged_paged_attention"]
    assert len(set(settings)) == len(settings)
    done = {case_of("ragged_paged_attention", some.split()) for some in settings}
    for shape in SHAPES:
        for shards in (1, 2, 4, 8):
            assert case_of("ragged_paged_attention", [f"model={shape.name}", f"shards={shards}"]) in done


def test_the_subset_has_every_op() -> None:
    """And two cases more beside those in slabs, so that CI's four minutes last."""
    subset = gpu_compile_all.cases(subset=True)
    assert {op for op, _ in subset} == set(OPS)
    assert len(subset) <= len(OPS) + 2 + sum(map(len, gpu_compile_all.IN_SLABS.values()))


def answer(monkeypatch: pytest.MonkeyPatch, results: dict[str, list[dict[str, object]]]) -> list[str]:
    """Compilations give `results` by settings, and fail for others; the settings that were compiled."""
    asked: list[str] = []

    def compile_op(card: str, op: str, settings: list[str], timeout_s: float) -> list[dict[str, object]]:
        asked.append(*settings)
        if settings[0] not in results:
            raise RuntimeError("ptxas refused")
        return results[settings[0]]

    monkeypatch.setattr(gpu_compile_all, "compile_op", compile_op)
    monkeypatch.setattr(gpu_compile_all, "cases", lambda subset: [("layers", "page=8"), ("layers", "page=9")])
    return asked


def test_a_status_for_ci(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """1 where a kernel spills or does not compile; the rest is compiled all the same."""
    nine = [record(case="nine")]
    answer(monkeypatch, {"page=8": [record()], "page=9": nine})
    assert gpu_compile_all.main(["--subset"]) == 0
    answer(monkeypatch, {"page=8": [record(spill_load_bytes=4)], "page=9": nine})
    assert gpu_compile_all.main(["--subset"]) == 1
    monkeypatch.setitem(gpu_compile_all.ALLOWED_SPILL_BYTES, ("page=8", "k_"), 4)
    assert gpu_compile_all.main([]) == 0
    answer(monkeypatch, {"page=9": nine})
    capsys.readouterr()
    assert gpu_compile_all.main([]) == 1
    printed = capsys.readouterr().out
    assert "ptxas refused" in printed
    assert "nine" in printed


def test_a_run_goes_on_where_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not compile is tried again; what did is not, and is still judged."""
    arguments = [f"--results={tmp_path / 'all.json'}"]
    answer(monkeypatch, {"page=9": [record(spill_load_bytes=4)]})
    assert gpu_compile_all.main(arguments) == 1
    asked = answer(monkeypatch, {"page=8": [record()]})
    assert gpu_compile_all.main(arguments) == 1
    assert asked == ["page=8"]
    assert [result.settings for result in gpu_compile_all.load(tmp_path / "all.json")] == ["page=9", "page=8"]


def test_the_table_leaves_out_what_nobody_uses() -> None:
    header, row = gpu_compile.table([record()]).splitlines()
    assert header.split()[-1] == "HGMMA"
    assert row.split() == ["decode", "k", "alone", "168", "0", "0", "1000", "2"]


def test_a_failed_compilation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_CUDA_PYTHON", sys.executable)
    with pytest.raises(RuntimeError, match=r"kv_write heed=1: .*expected a setting out of"):
        gpu_compile.compile_op("h100", "kv_write", ["heed=1"])
