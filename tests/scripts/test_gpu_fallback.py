"""Counting launches and bytes of compiled modules, and the bars of what GPUs without kernels run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import gpu_compile_all, gpu_fallback
from scripts.gpu_aot.fallback import moved_by, runs_of
from scripts.gpu_aot.fallback_cases import CASES, MIB, SUBSET
from scripts.gpu_aot.module_cost import Loop, ModuleCost, shape_bytes

MODULE = """HloModule jit_call, is_scheduled=true

%gathered (p.0: bf16[100,8], p.1: s32[4]) -> f32[4,8] {
  %p.0 = bf16[100,8]{1,0} parameter(0)
  %p.1 = s32[4]{0} parameter(1)
  %convert.1 = f32[100,8]{1,0} convert(%p.0)
  ROOT %gather.1 = f32[4,8]{1,0} gather(%convert.1, %p.1), offset_dims={1}
}

%scattered (p.0: f32[100,8], p.1: f32[4,8], p.2: s32[4]) -> f32[100,8] {
  %p.0 = f32[100,8]{1,0} parameter(0)
  %p.2 = s32[4]{0} parameter(2)
  %p.1 = f32[4,8]{1,0} parameter(1)
  ROOT %scatter.1 = f32[100,8]{1,0} scatter(%p.0, %p.2, %p.1), to_apply=%add
}

%condition (arg: (s32[], f32[100,8], bf16[100,8], s32[4])) -> pred[] {
  %arg = (s32[], f32[100,8]{1,0}, bf16[100,8]{1,0}, s32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  ROOT %compare.1 = pred[] compare(%i, %i), direction=LT
}

%body (arg: (s32[], f32[100,8], bf16[100,8], s32[4])) -> (s32[], f32[100,8], bf16[100,8], s32[4]) {
  %arg = (s32[], f32[100,8]{1,0}, bf16[100,8]{1,0}, s32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %state = f32[100,8]{1,0} get-tuple-element(%arg), index=1
  %pages = bf16[100,8]{1,0} get-tuple-element(%arg), index=2
  %ids = s32[4]{0} get-tuple-element(%arg), index=3
  %taken = f32[4,8]{1,0} fusion(%pages, %ids), kind=kLoop, calls=%gathered, metadata={op_name="x"}
  %put = f32[100,8]{1,0} fusion(%state, %taken, %ids), kind=kInput, calls=%scattered
  ROOT %tuple.1 = (s32[], f32[100,8]{1,0}, bf16[100,8]{1,0}, s32[4]{0}) tuple(%i, %put, %pages, %ids)
}

ENTRY %main (a: (s32[], f32[100,8], bf16[100,8], s32[4])) -> f32[100,8] {
  %a = (s32[], f32[100,8]{1,0}, bf16[100,8]{1,0}, s32[4]{0}) parameter(0)
  %while.1 = (s32[], f32[100,8]{1,0}, bf16[100,8]{1,0}, s32[4]{0}) while(%a), condition=%condition, body=%body, metadata={op_name="jit(f)/short/trips/while"}
  %got = f32[100,8]{1,0} get-tuple-element(%while.1), index=1
  ROOT %copy.1 = f32[100,8]{1,0} copy(%got)
}
"""  # noqa: E501  as XLA prints it


def test_a_kernel_costs_what_it_takes_of_pages_and_puts_into_states() -> None:
    """Per trip 2 kernels: 4 rows read as bfloat16 and written, read again and put into the state; ids twice."""
    cost = ModuleCost(MODULE, lambda loop: runs_of(loop, {"short/trips": 5})).total()
    taken = 4 * 8 * 2 + 16 + 4 * 8 * 4
    put = 4 * 8 * 4 + 16 + 4 * 8 * 4
    condition = 6 * (1 + 4 + 4)
    assert cost.launches == 5 * 2 + 6 + 1
    assert cost.num_bytes == 5 * (taken + put) + condition + 2 * 100 * 8 * 4


def test_sizes_of_shapes() -> None:
    """Of dtypes by their names, and of tuples."""
    assert shape_bytes("bf16[3,4]{1,0}") == 24
    assert shape_bytes("(f8e4m3fn[10]{0}, pred[3]{0}, s32[])") == 10 + 3 + 4


@pytest.mark.parametrize(
    ("scope", "runs"),
    [
        ("jit(f)/long/chunks/while", 3),
        ("jit(f)/long/chunks/while/body/trips/while", 7),
        ("jit(f)/long/chunks/while/body/merge/while", 2),
    ],
)
def test_loops_run_as_often_as_their_innermost_scope_says(scope: str, runs: int) -> None:
    """Loops within loops have the scopes of both."""
    trips = {"long/chunks": 3, "long/trips": 7, "long/merge": 2, "short/trips": 1}
    assert runs_of(Loop(scope, None), trips) == runs


def test_a_loop_that_nobody_knows_is_an_error() -> None:
    """Its trips are not guessed."""
    with pytest.raises(ValueError, match=r"expected a loop of one of \['short/trips'\], got jit\(f\)/other/while"):
        runs_of(Loop("jit(f)/other/while", None), {"short/trips": 1})


def test_a_kernel_in_triton_moves_what_its_author_says() -> None:
    """Found by all parts of its name; one that nobody knows is an error."""
    kernels = {"short/attend": 3.0, "long/attend": 5.0}
    line = '  ROOT %a.1 = f32[4]{0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton", '
    text = (
        f'ENTRY %main (b: f32[4]) -> f32[4] {{\n{line}metadata={{op_name="jit(f)/long/cond/attend/pallas_call"}}\n}}\n'
    )
    cost = ModuleCost(text, lambda loop: 0, lambda scope: moved_by(scope, kernels)).total()
    assert (cost.launches, cost.num_bytes) == (1, 5.0)
    with pytest.raises(ValueError, match=r"expected a kernel of one of \['long/attend', 'short/attend'\], got jit"):
        moved_by("jit(f)/other/attend", kernels)
    with pytest.raises(ValueError, match="expected no kernel in Triton, got jit"):
        ModuleCost(text, lambda loop: 0).total()


def test_ci_fails_above_the_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each bar, in the script and in the compilation of everything."""
    within: dict[str, Any] = {
        "card": "a100",
        "launches": 10,
        "temporary_bytes": MIB,
        "bytes": 3e9,
        "named_bytes": 1e9,
        "paper_ms": 3.0,
        "least_ms": 1.0,
        "times": 3.0,
        "kernels": {"attend": (128, 0)},
        "spill_bytes": 0,
    }
    above: dict[str, Any] = {}
    monkeypatch.setattr(gpu_fallback, "compile_case", lambda case: within | {"case": case.name} | above)
    monkeypatch.setattr(gpu_compile_all, "cases", lambda subset: [])
    assert gpu_fallback.main(["--check"]) == 0
    assert gpu_compile_all.main(["--subset"]) == 0
    for name, value in (("launches", 10_000), ("temporary_bytes", 500 * MIB), ("times", 100.0), ("spill_bytes", 999)):
        above = {name: value}
        assert gpu_fallback.main([]) == 0
        assert gpu_fallback.main(["--check", "--subset"]) == 1
        assert f"{SUBSET[0]}: expected at most" in capsys.readouterr().err
        assert gpu_compile_all.main(["--subset"]) == 1


def test_all_that_auto_takes_is_within_four_times_of_its_bytes() -> None:
    """The bar of what GPUs run by themselves; XLA by name may say another."""
    taken = [case for case in CASES if "in XLA" not in case.name]
    assert {case.op for case in taken} == {"attention", "mla", "scan", "delta", "indexer", "compressor"}
    assert all(case.most_times <= 4 and case.most_launches <= 120 for case in taken)
    assert set(SUBSET) <= {case.name for case in CASES}
