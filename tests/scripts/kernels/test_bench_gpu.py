"""scripts/bench_gpu.py without a GPU: the dry run, what is refused, peaks measured on CPU, rivals, the roofline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Results, Step, of_step
from pallas_kernels.cases.compare import excess
from pallas_kernels.kv_write.cases import WriteCase
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from pallas_kernels.ragged_paged_attention.shapes import AttentionShape
from scripts import bench_gpu
from scripts.lab.bench import gpu_timing, measure, report, rivals_flash, rivals_gpu, rivals_torch, roofline, timing
from scripts.lab.bench.case import Sizes, bench_case
from scripts.lab.bench.chain import Chain
from scripts.lab.bench.timing import Timing

SIZES = Sizes("gpu", 4, "float32", step=Step(small=True))


def attention_case(kind: str, **options: int) -> AttentionCase:
    shape = AttentionShape("x", "x", 4, 2, 16, **options)
    return of_step(AttentionCase, shape, kind, SIZES.step, **SIZES.given)


def test_a_dry_run_has_sizes_and_no_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    picked = ["--op", "page_ops", "--op", "kv_write", "--shape", "llama3-8b", "--kind", "copy", "--kind", "decode"]
    assert bench_gpu.main(["--dry-run", *picked, "--page", "16", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no gpu here: a dry run at small sizes, without times"
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["excess"], row["median_us"]) for row in rows] == [
        ("page_ops", 0, None),
        ("kv_write", 0, None),
    ]
    assert len(lines) == 4


def test_a_run_goes_on_from_its_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Cases in the file do not run again; a line that a kill tore off is a case that does."""
    path = tmp_path / "rows.jsonl"
    picked = [
        "--dry-run",
        "--op",
        "page_ops",
        "--shape",
        "llama3-8b",
        "--kind",
        "copy",
        "--kind",
        "zero",
        "--page",
        "16",
    ]
    picked += ["--by-reference", "--results", str(path)]
    assert bench_gpu.main(picked) == 0
    first, second = path.read_text().splitlines()
    assert len(capsys.readouterr().out.splitlines()) == 4
    path.write_text(f"{first}\n{second[:50]}")
    assert bench_gpu.main([*picked, "--json", str(tmp_path / "all.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "page_ops/zero" in lines[2]
    assert len(json.loads((tmp_path / "all.json").read_text())["rows"]) == 2
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match="expected cases of a benchmark"):
        bench_gpu.main(picked)


def test_no_case_begins_after_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    picked = ["--dry-run", "--op", "page_ops", "--shape", "llama3-8b", "--page", "16", "--by-reference"]
    assert bench_gpu.main([*picked, "--budget", "1e-9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 cases left out for want of time"
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main([*picked, "--budget", "0"])
    assert "expected --budget of more than 0 minutes, got 0.0" in capsys.readouterr().err


def test_an_op_without_a_kernel_says_so_and_runs_the_reference() -> None:
    class WithoutKernel(WriteCase):
        def call(self, backend: str, pages: Any, rest: Any) -> Results:
            if backend == "gpu":
                raise NotImplementedError("kv_write: there is no gpu kernel")
            return super().call(backend, pages, rest)

    case = bench_case(WithoutKernel, "decode", AttentionShape("x", "x", 4, 2, 16), SIZES)
    kernel, reference = measure.dry_run(case, bench_gpu.GPU)
    assert (kernel.by, kernel.note) == ("kernel, interpreted", "cannot: kv_write: there is no gpu kernel")
    assert (reference.by, reference.excess) == ("reference", 0)
    assert not report.is_wrong(kernel)


def test_a_plot_needs_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main(["--dry-run", "--plot", str(tmp_path / "x.png")])
    assert "expected a GPU for --plot: a dry run has no times" in capsys.readouterr().err


def test_peaks_are_what_a_copy_and_a_product_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Chain] = []

    def clock(chain: Chain, repeats: int) -> Timing:
        seen.append(chain)
        chain.run()
        return Timing((2.0,), "a test")

    peaks = gpu_timing.measured_peaks(clock, copied_bytes=1 << 12, matrix=16)
    assert peaks.bytes_per_s == pytest.approx(2 * 4096 / 2e-6)
    assert peaks.flops_per_s == pytest.approx(2 * 16**3 / 2e-6)
    assert peaks.source.startswith("measured")
    assert [chain.num_calls for chain in seen] == [2, 2]


def test_without_a_profiler_the_wall_clock_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-4)
    chain = Chain(lambda pages, rest: (rest + 1, ()), [Arguments((), jnp.zeros(4))] * 2, writes=False)
    monkeypatch.setattr(gpu_timing, "cupti", lambda chain, repeats: None)
    assert gpu_timing.gpu_clock(chain, 2).clock == "wall"
    monkeypatch.setattr(gpu_timing, "cupti", lambda chain, repeats: Timing((1.0,), "cupti"))
    assert gpu_timing.gpu_clock(chain, 2).clock == "cupti"
    chain.writes = True
    assert gpu_timing.gpu_clock(chain, 2).clock == "wall"


def test_the_profilers_milliseconds_are_of_all_calls_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.mosaic.gpu import profiler

    monkeypatch.setattr(profiler, "measure", lambda program: lambda *arguments: (program(*arguments), 0.5))
    chain = Chain(lambda pages, rest: (rest + 1, ()), [Arguments((), jnp.zeros(4))] * 4, writes=False)
    assert gpu_timing.cupti(chain, 3) == Timing((125.0,) * 3, "cupti")
    for nothing in (None, RuntimeError("no CUPTI")):

        def measure(program: object, nothing: object = nothing) -> object:
            def run(*arguments: object) -> tuple[None, None]:
                if isinstance(nothing, Exception):
                    raise nothing
                return None, None

            return run

        monkeypatch.setattr(profiler, "measure", measure)
        assert gpu_timing.cupti(chain, 3) is None


def test_upstreams_decode_is_given_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place stands what its docstring says that it computes."""

    def paged_attention(q, k_pages, v_pages, tables, lengths, **options):  # type: ignore[no-untyped-def]
        assert tables.shape[1] % options["k_splits"] == 0
        assert tables.shape[1] // options["k_splits"] % options["pages_per_compute_block"] == 0
        assert options["attn_logits_soft_cap"] is None
        outs = []
        for row, table, length in zip(q, tables, lengths, strict=True):
            k, v = (x[:, table].reshape(x.shape[0], -1, x.shape[-1])[:, :length] for x in (k_pages, v_pages))
            weights = jax.nn.softmax(jnp.einsum("hgd,hkd->hgk", row.reshape(k.shape[0], -1, row.shape[-1]), k))
            outs.append(jnp.einsum("hgk,hkd->hgd", weights, v).reshape(row.shape))
        return jnp.stack(outs)

    name = "jax.experimental.pallas.ops.gpu.paged_attention"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(paged_attention=paged_attention))
    case = attention_case("decode")
    given = case.arguments(0)
    rival = next(rival for rival in rivals_gpu.rivals(case) if rival.name == "jax paged_attention")
    found, _ = rivals_gpu.decode(case, *rival.prepare(given))
    assert excess(found, case.call("reference", *given)[0]) <= 1


@pytest.mark.parametrize(("kind", "window"), [("prefill", None), ("prefill", 5), ("decode-long", None)])
def test_dense_attention_is_given_the_same_numbers(kind: str, window: int | None) -> None:
    case = attention_case(kind, **({} if window is None else {"sliding_window": window}))
    given = case.arguments(0)
    kv, q = rivals_gpu.gathered(case, given)
    found, _ = rivals_gpu.dense(case, kv, q, implementation="xla")
    assert excess(found, case.call("reference", *given)[0]) <= 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # which needs a C++ compiler
@pytest.mark.parametrize("attend", rivals_torch.ATTENTIONS)
@pytest.mark.parametrize(("kind", "window"), [("prefill", None), ("prefill", 5), ("decode-long", None)])
def test_torch_is_given_the_same_numbers(attend: str, kind: str, window: int | None) -> None:
    pytest.importorskip("torch")
    case = attention_case(kind, **({} if window is None else {"sliding_window": window}))
    given = case.arguments(0)
    q, k, v = rivals_torch.tensors(rivals_gpu.gathered(case, given))
    make = rivals_torch.ATTENTIONS[attend]
    if window is not None and attend == "torch sdpa":
        with pytest.raises(NotImplementedError, match="windows need a mask"):
            make(case, q.shape[2], k.shape[2])
        return
    found = make(case, q.shape[2], k.shape[2])(q, k, v).transpose(1, 2).reshape(-1, *q.shape[1::2])
    assert excess(np.asarray(found), case.call("reference", *given)[0]) <= 1


def test_what_others_cannot_do_is_refused() -> None:
    mixed, windowed = attention_case("mixed"), attention_case("decode-32k", sliding_window=8)
    with pytest.raises(NotImplementedError, match="sequences of one length alone"):
        rivals_gpu.gathered(mixed, mixed.arguments(0))
    with pytest.raises(NotImplementedError, match="decode alone"):
        rivals_gpu._paged(mixed, mixed.arguments(0))
    with pytest.raises(NotImplementedError, match="no sinks, windows or chunks"):
        rivals_gpu.decode(windowed, *windowed.arguments(0))
    same = attention_case("decode-long", sliding_window=8)
    with pytest.raises(NotImplementedError, match="windows in prefill alone"):
        rivals_gpu.gathered(same, same.arguments(0))
    assert not list(rivals_gpu.rivals(WriteCase()))


def test_a_rival_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotImplementedError, match="torch is not installed"):
        rivals_torch.installed()


def test_the_roofline() -> None:
    pytest.importorskip("matplotlib")
    peaks = report.Peaks(2e12, 8e14, "measured")
    bench = bench_case(AttentionCase, "prefill", AttentionShape("x", "x", 4, 2, 16), SIZES)
    rows = [report.row(bench, by, Timing((us,), "cupti"), peaks) for by, us in (("kernel", 1.0), ("reference", 4.0))]
    rows.append(report.row(bench, "torch", note="cannot"))
    found, work = roofline.points(rows), bench.case.work
    assert set(found) == {"kernel", "reference"}
    assert found["kernel"] == [(work.flops / work.num_bytes, pytest.approx(work.flops * 1e6))]
    assert (roofline.roof(peaks, 100), roofline.roof(peaks, 1000)) == (2e14, 8e14)
    figure = roofline.draw(rows, peaks, "a card")
    (axis,) = figure.axes
    assert figure.get_suptitle() == "How near each kernel comes to what the device can do\na card"
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("operations per byte read or written", "TFLOP/s")
    lines = dict(zip(axis.get_legend_handles_labels()[1], axis.lines, strict=True))
    assert list(lines) == ["roof: memory, then arithmetic (measured)", "kernel", "reference"]
    assert lines["kernel"].get_ydata() == [pytest.approx(work.flops * 1e-6)]
    assert max(axis.lines[0].get_ydata()) == 800


@pytest.mark.parametrize(("kind", "window"), [("prefill", None), ("prefill", 5), ("decode-long", None), ("decode", 3)])
def test_flashinfer_is_given_the_same_numbers(kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of its wrappers stands what their documentation says that they compute of what they planned."""
    torch = pytest.importorskip("torch")

    class Wrapper:
        def __init__(self, workspace: object, layout: str) -> None:
            assert layout == "NHD"

        def plan(self, *given, causal: bool = False, **options) -> None:  # type: ignore[no-untyped-def]
            *starts, first, named, last, _, _, _, page = given
            rows = len(last)
            self.starts = starts[0].tolist() if starts else list(range(rows + 1))
            self.pages = [named[first[i] : first[i + 1]] for i in range(rows)]
            self.lengths = [page * (len(pages) - 1) + int(last[i]) for i, pages in enumerate(self.pages)]
            self.options = options

        def run(self, q, pages):  # type: ignore[no-untyped-def]
            outs = []
            for i, (named, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
                rows = q[self.starts[i] : self.starts[i + 1]]
                k, v = (x[named.long()].flatten(0, 1)[:length].transpose(0, 1) for x in pages)
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in (k, v))
                past = length - rows.shape[0] + torch.arange(rows.shape[0])[:, None] - torch.arange(length)
                left = self.options["window_left"]
                mask = (past >= 0) & ((past <= left) | torch.tensor(left < 0))
                scores = rows.transpose(0, 1) @ k.transpose(1, 2) * self.options["sm_scale"]
                outs.append((scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1))
            return torch.cat(outs)

    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**dict.fromkeys(names, Wrapper)))
    case = attention_case(kind, **({} if window is None else {"sliding_window": window}))
    given = case.arguments(0)
    q, (tables, lengths, starts, _), *_ = given.rest
    arrays = tuple(torch.from_dlpack(array) for array in (q, *given.pages))
    step = tuple(torch.from_dlpack(array) for array in (tables, lengths, starts))
    found = rivals_flash.flashinfer(case, arrays, step)()
    assert excess(np.asarray(found), case.call("reference", *given)[0]) <= 1


def test_a_rival_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case("decode-long")
    for name in ("flashinfer", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    for make in rivals_flash.PAGED.values():
        with pytest.raises(NotImplementedError, match="is not installed"):
            make(case, (), ())
