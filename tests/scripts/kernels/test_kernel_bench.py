"""The harness of the kernel benchmarks: chains, samples, rows, and a measurement with the CPU as the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Results, Step, Work
from pallas_kernels.cases.compare import excess
from pallas_kernels.kv_write.cases import WriteCase
from pallas_kernels.merge_states.cases import MergeCase
from pallas_kernels.ragged_paged_attention.shapes import AttentionShape
from scripts.lab.bench import driver, measure, report, timing
from scripts.lab.bench.case import Sizes, bench_case
from scripts.lab.bench.chain import Chain, num_rotated
from scripts.lab.bench.platform import Platform, Rival
from scripts.lab.bench.timing import Timing

SHAPE = AttentionShape("tiny", "x", 4, 2, 8)
SIZES = Sizes("cpu", 4, step=Step(small=True))
PEAKS = report.Peaks(1e9, 1e12, "a test")


def rival(name: str, error: Exception | None = None) -> Rival:
    def call(pages: Any, rest: Any) -> Any:
        if error is not None:
            raise error
        return WriteCase().call("reference", pages, rest)

    return Rival(name, lambda arguments: arguments, call, note="unlike ours")


CPU = Platform(
    name="reference",
    device_kind="cpu",
    pages=(4,),
    cache_bytes=1,
    peaks=lambda device: PEAKS,
    time=timing.wall_clock,
    interpreted_calls=2,
    rivals=lambda case: [
        rival("other"),
        rival("unable", NotImplementedError("no sinks\nat all")),
        rival("broken", RuntimeError("out of memory")),
    ],
)


@pytest.fixture(autouse=True)
def _short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-3)


def test_a_chain_runs_each_call_on_arguments_of_its_own_and_keeps_what_was_written() -> None:
    rotated = [Arguments((jnp.full(3, float(n)),), jnp.asarray(float(n))) for n in range(3)]
    chain = Chain(lambda pages, rest: (rest * 2, (pages[0] + rest,)), rotated, writes=True)
    outs, _ = chain.run()
    assert [float(out) for out in outs] == [0.0, 2.0, 4.0]
    _, written = chain.run()
    assert [float(pages[0][0]) for pages in written] == [0.0, 3.0, 6.0]  # n + n + n


def test_xla_merges_no_calls_of_a_chain() -> None:
    pages, rest = (jnp.ones((4, 8)),), jnp.ones((8, 4))
    chain = Chain(lambda pages, rest: (pages[0] @ rest, ()), [Arguments(pages, rest)] * 3, writes=False)
    text = chain.program.lower(*chain.arguments).as_text()
    assert text.count("dot_general") == 3
    assert text.count("optimization_barrier") == 2


@pytest.mark.parametrize(("num_bytes", "count"), [(1, 16), (10, 16), (50, 4), (100, 2), (10_000, 2)])
def test_rotated_arguments_are_twice_the_cache(num_bytes: int, count: int) -> None:
    assert num_rotated(num_bytes, 100) == count


def test_the_middle_sample_and_the_distance_of_the_quartiles() -> None:
    assert Timing((4.0, 1.0, 3.0, 2.0, 100.0), "wall").median_us == 3.0
    assert Timing((4.0, 1.0, 3.0, 2.0, 5.0), "wall").spread_us == 2.0
    assert Timing((4.0,), "wall").spread_us == 0.0


def test_a_sample_is_the_batch_less_the_empty_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a dispatch moves by 3 us, a call by 10 us and an empty program's way there and back by 7 us."""
    monkeypatch.setattr(timing, "empty_seconds", lambda: 7e-6)
    monkeypatch.setattr(timing, "_batch_seconds", lambda run, count: 7e-6 + count * 4 * 10e-6)
    chain = Chain(lambda pages, rest: (rest, ()), [Arguments((), jnp.zeros(1))] * 4, writes=False)
    found = timing.wall_clock(chain, 3)
    assert found.clock == "wall"
    np.testing.assert_allclose(found.samples_us, [10.0] * 3)


def test_a_batch_grows_until_it_is_long_enough() -> None:
    assert 34 <= timing.batch_size(lambda count: count * 3e-5) <= 50
    assert timing.batch_size(lambda count: 0.0) == 1024
    assert timing.batch_size(lambda count: 1.0) == 1


def test_differences_are_in_units_of_the_tolerance() -> None:
    exact = np.ones(3, np.float32)
    assert excess(exact, exact) == 0
    assert excess((exact + 5e-6, exact), (exact, exact)) == pytest.approx(0.5, rel=0.1)
    assert excess(exact.astype(jnp.bfloat16), (exact * 1.04).astype(jnp.bfloat16)) > 1
    assert excess(exact * np.nan, exact) == float("inf")
    assert excess((), ()) == 0


def test_a_case_is_compared_timed_and_set_next_to_its_rivals() -> None:
    case = bench_case(WriteCase, "decode", SHAPE, SIZES)
    rows = list(measure.on_device(case, CPU, PEAKS, repeats=2, rivals=True, time_reference=True))
    assert [row.by for row in rows] == ["kernel", "reference", "other", "unable", "broken"]
    for row in rows[:3]:
        assert row.median_us is not None
        assert row.median_us > 0
        assert row.clock == "wall"
        assert row.bandwidth_share == pytest.approx(case.case.work.num_bytes / (row.median_us * 1e-6) / 1e9)
    assert rows[0].excess == rows[2].excess == 0
    assert rows[2].note == "unlike ours"
    assert [row.note for row in rows[3:]] == ["cannot: no sinks", "failed: out of memory"]
    assert rows[3].median_us is None
    assert not any(report.is_wrong(row) for row in rows)


def test_a_kernel_that_is_wrong_or_fails_is_said_and_counted() -> None:
    class Doubled(MergeCase):
        def call(self, backend: str, pages: Any, rest: Any) -> Results:
            return Results(rest[0] * (2.0 if backend == "bad" else 1.0), ())

    class Failing(MergeCase):
        def call(self, backend: str, pages: Any, rest: Any) -> Results:
            return {}["x"] if backend == "bad" else Results(rest[0], ())

    platform = replace(CPU, name="bad")
    (row,) = measure.dry_run(bench_case(Doubled, "2 parts", SHAPE, SIZES), platform)
    assert report.is_wrong(row)
    assert "wrong: " in report.line(row)
    rows = list(measure.dry_run(bench_case(Failing, "2 parts", SHAPE, SIZES), platform))
    assert [(row.by, row.note, row.excess) for row in rows] == [
        ("kernel, interpreted", "failed: 'x'", None),
        ("reference", "", 0),
    ]
    assert report.is_wrong(rows[0])


def test_a_row_without_a_device_has_no_times() -> None:
    class Known(MergeCase):
        work = Work(2_000_000, 3_000_000_000)

    row = report.row(bench_case(Known, "2 parts", SHAPE, SIZES), "reference", excess=0.5)
    assert (row.median_us, row.bandwidth_share, row.flops_share, row.clock) == (None, None, None, None)
    assert report.line(row).split()[-7:] == ["2.00", "3.00", "-", "-", "-", "-", "close"]


def test_shapes_that_measure_the_same_are_measured_once() -> None:
    options = driver.parser("doc", CPU).parse_args(["--op", "kv_write"])
    names = {case.model for case in driver.picked(options, replace(CPU, name="cpu"))}
    assert "llama3-8b" in names
    assert "llama3-70b" not in names
    options.shape = ["llama3-70b"]
    assert {case.model for case in driver.picked(options, replace(CPU, name="cpu"))} == {"llama3-70b"}
