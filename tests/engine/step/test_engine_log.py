"""What the engine writes to its logger, and that it adds no handler."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvjax.engine import GenerationResult, SamplingParams, StepOutputs, StepStats
from tests.engine.engines import FEW_BLOCKS, assert_no_leak, golden_prompts, make_engine
from tests.engine.failures import plant

NAME = "llama"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def texts(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_an_engine_that_is_made_says_what_its_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvjax.engine"):
        make_engine(NAME)
    text = texts(caplog, logging.INFO)[-1]
    assert text.startswith("KV cache of 600 blocks, ")
    assert text.endswith("requests of 136 tokens at once; at most 8 requests and 64 tokens a step")


def test_preemptions_are_warned_of_when_they_have_doubled(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(NAME, num_blocks=FEW_BLOCKS[NAME], watermark=0.0, enable_prefix_caching=False)
    for _ in range(3):
        engine.generate(golden_prompts(NAME), GREEDY)
    total = sum(stats.num_preemptions for stats in engine.step_stats)
    warnings = texts(caplog, logging.WARNING)
    assert total >= 3
    assert 1 < len(warnings) <= total.bit_length()
    assert "requests were preempted (1 so far)" in warnings[0]


def test_every_step_and_the_end_of_each_request_are_written_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(NAME)
    with caplog.at_level(logging.DEBUG, "kvjax.engine"):
        engine.generate([[1, 2, 3]], GREEDY)
        engine.abort(engine.add_request([1]))
    written = texts(caplog, logging.DEBUG)
    assert sum(text.startswith("step ") for text in written) == len(engine.step_stats) == 24
    assert "step 1: 3 tokens of 1 requests, 1 sampled; 1 run, 0 wait, blocks held: 1 of 599" in written
    assert "request request-0: length after 24 tokens" in written
    assert "request request-1: abort after 0 tokens" in written
    assert not logging.getLogger("kvjax").handlers
    assert not logging.getLogger("kvjax.engine").handlers


def test_a_restart_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    engine.add_request([1, 2], GREEDY)
    plant(monkeypatch, "kvjax.device.steps.update_step.UpdateStep.__call__", {0: RuntimeError}, "after")
    with pytest.raises(RuntimeError):
        engine.step()
    [text] = texts(caplog, logging.WARNING)
    assert "broken off by RuntimeError('planted')" in text
    assert "1 requests start again" in text


def test_an_interrupted_warm_up_loses_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    engine = make_engine(NAME)
    with pytest.raises(KeyboardInterrupt):
        engine.warmup(interrupt)
    assert texts(caplog, logging.WARNING) == []
    assert engine.generate([[1, 2]], GREEDY)[0].output_token_ids.size


def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Raising:
        def step_ended(self, stats: StepStats, outputs: StepOutputs) -> Any:
            raise ValueError("observer")

        def request_aborted(self, result: GenerationResult) -> Any:
            raise ValueError("observer")

    engine = make_engine(NAME)
    expected = engine.generate([[1, 2]], GREEDY)[0].output_token_ids.tolist()
    engine.add_observer(Raising())
    assert engine.generate([[1, 2]], GREEDY)[0].output_token_ids.tolist() == expected
    engine.abort(engine.add_request([1]))
    assert texts(caplog, logging.ERROR) == ["an observer of the engine raised"] * 25
    assert_no_leak(engine)
