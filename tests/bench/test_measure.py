"""What is measured obeys its own arithmetic: tokens, seconds, parts, hits and blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.bench.hugging_face import HuggingFaceProcess
from kvjax.bench.measure import Speed, Speeds, measure_engine, measure_hugging_face, median_speeds
from kvjax.bench.report import BenchResult, WarmUp, bench_json, bench_text
from kvjax.bench.workload import Workload
from tests.bench.test_hugging_face import ANSWERS, interpreter
from tests.engine.engines import assert_no_leak, make_engine

BATCH, PROMPT_LEN, NEW, SHARED = 4, 37, 9, 19
WORKLOAD = Workload.make(100, batch=BATCH, prompt_len=PROMPT_LEN, num_new_tokens=NEW, shared_len=SHARED)
WARM_UP = WarmUp(num_shapes=2, seconds=1.5, num_programs=5, num_cached=3)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_figures_of_an_engine_add_up(async_scheduling: bool) -> None:
    engine = make_engine("qwen3", async_scheduling=async_scheduling)
    for _ in range(2):  # the second run finds nothing of the first
        run = measure_engine(engine, WORKLOAD)
        assert_no_leak(engine)
        speeds = run.speeds
        assert speeds.prefill.tokens == BATCH * PROMPT_LEN
        assert speeds.total.tokens == BATCH * (PROMPT_LEN + NEW)
        assert BATCH * (NEW - 2) <= speeds.decode.tokens <= BATCH * (NEW - 1)  # steps of 64 tokens: some start late
        assert 0 < speeds.decode.wall_s < speeds.total.wall_s
        assert 0 < speeds.decode.cpu_s < speeds.total.cpu_s
        for speed in (speeds.prefill, speeds.decode, speeds.total, run.sharing):
            assert speed.tokens_per_s * speed.wall_s == pytest.approx(speed.tokens)
            assert speed.tokens_per_cpu_s * speed.cpu_s == pytest.approx(speed.tokens)
        assert NEW - 2 <= run.parts.num_steps <= NEW
        assert sum(run.parts.wall_us.values()) * run.parts.num_steps <= speeds.decode.wall_s * 1e6
        assert all(us >= 0 for us in run.parts.wall_us.values())
        assert all(run.parts.wall_us[part] > 0 for part in ("schedule", "plan", "dispatch", "wait", "update"))
        assert run.sharing.tokens == run.queried_tokens == BATCH * PROMPT_LEN
        assert run.hit_tokens == (BATCH - 1) * (SHARED // 8 * 8)  # blocks of 8 tokens
        (peak,) = run.pool_peaks
        assert BATCH * (PROMPT_LEN // 8) <= peak.held <= BATCH * ((PROMPT_LEN + NEW) // 8 + 1) < peak.num_blocks
    plain = make_engine("qwen3").generate(WORKLOAD.prompts, engine_params())
    assert speeds.tokens == [result.output_token_ids.tolist() for result in plain]


def engine_params():  # type: ignore[no-untyped-def]
    from kvjax.engine import SamplingParams

    return SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def test_an_engine_that_is_busy_is_refused() -> None:
    engine = make_engine("qwen3")
    engine.add_request([1, 2, 3])
    with pytest.raises(ValueError, match="expected an engine without requests, got 1 unfinished"):
        measure_engine(engine, WORKLOAD)


def test_decode_of_hugging_face_is_the_total_without_the_prefill(tmp_path: Path) -> None:
    """The fake takes 2 s by the clock and 1 s of process time for any call."""
    with HuggingFaceProcess(tmp_path, python=interpreter(tmp_path, ANSWERS)) as process:
        speeds = measure_hugging_face(process, WORKLOAD)
    assert speeds.prefill == Speed(BATCH * PROMPT_LEN, 2.0, 1.0)
    assert speeds.total == Speed(BATCH * (PROMPT_LEN + NEW), 2.0, 1.0)
    assert speeds.decode == Speed(BATCH * (NEW - 1), 0.0, 0.0)
    assert speeds.decode.tokens_per_s == speeds.decode.tokens_per_cpu_s == 0


def test_each_part_is_that_of_its_median_run() -> None:
    def speeds(prefill: float, decode: float) -> Speeds:
        return Speeds(Speed(10, prefill, 1.0), Speed(5, decode, 1.0), Speed(15, prefill + decode, 1.0), [[1]])

    median = median_speeds([speeds(3.0, 1.0), speeds(1.0, 2.0), speeds(2.0, 9.0)])
    assert (median.prefill.wall_s, median.decode.wall_s, median.total.wall_s) == (2.0, 2.0, 4.0)
    assert median_speeds([speeds(4.0, 3.0)]) == speeds(4.0, 3.0)


def test_reports_say_what_was_measured() -> None:
    engine = make_engine("qwen3")
    run = measure_engine(engine, WORKLOAD)
    alone = BenchResult(WORKLOAD, WARM_UP, [run])
    text = bench_text(alone)
    assert "Warm-up: 2 step shapes in 1.5 s, 5 programs, 3 of them from the compilation cache." in text
    assert "Hugging Face" not in text
    assert "floor" not in text
    assert (bench_json(alone)["hugging_face"], bench_json(alone)["floor"]) == ({}, None)
    half = Speeds(
        *(Speed(one.tokens, 2 * one.wall_s, 4 * one.cpu_s) for one in (run.speeds.prefill, run.speeds.decode)),
        Speed(run.speeds.total.tokens, 2 * run.speeds.total.wall_s, 4 * run.speeds.total.cpu_s),
        [*run.speeds.tokens[:-1], [0] * NEW],
    )
    floor = replace(half, tokens=[])
    both = BenchResult(WORKLOAD, WARM_UP, [run], {"HF": [half]}, {"torch": "2", "transformers": "5"}, floor)
    lines = bench_text(both).splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert "(HF: torch 2, transformers 5; the same tokens for 3 of 4 prompts)" in lines
    ratios = [line.split()[-6:] for line in lines if line.startswith("  kvjax / it")]
    assert ratios == [["2.00"] * 3 + ["4.00"] * 3] * 2
    (own,) = [line.split()[1:] for line in lines if line.startswith("kvjax ")]
    assert own[0] == f"{run.speeds.prefill.tokens_per_s:,.0f}"
    assert own[4] == f"{run.speeds.decode.tokens_per_cpu_s:,.0f}"
    data = bench_json(both)
    assert data["hugging_face"]["HF"]["equal_rows"] == 3
    assert data["floor"]["decode"]["wall_s"] == 2 * run.speeds.decode.wall_s
    assert data["sharing"]["hit_rate"] == run.hit_tokens / run.queried_tokens
    assert data["speeds"]["decode"]["tokens"] == run.speeds.decode.tokens
