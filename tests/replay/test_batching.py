"""Laws of continuous batching in virtual time: all tokens come out, bounds hold, time is the speed model's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.replay import BatchingConfig, ReplayConfig, ReplayResult, SpeedModel, TraceRequest, run_replay
from tests.replay.random_traces import random_trace
from tests.replay.test_serial import full

BATCHING = BatchingConfig(max_num_batched_tokens=256, max_num_seqs=8)


def replay(trace: list[TraceRequest], **changes) -> ReplayResult:
    config = ReplayConfig(full(16), num_blocks=2_000, batching=BATCHING, hash_algorithm="xxhash_cbor")
    return run_replay(trace, replace(config, **changes))


def check_nothing_is_left(result: ReplayResult) -> None:
    for pool in result.recorder.pools:
        pool.check_invariants()
        assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("num_blocks", [210, 5_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_with_all_its_tokens(seed: int, num_blocks: int) -> None:
    trace = random_trace(seed, 25, max_output=150)
    result = replay(trace, num_blocks=num_blocks)
    recorder = result.recorder
    assert (recorder.requests, recorder.refused) == (25, 0)
    assert recorder.output_tokens == sum(request.output_length for request in trace)
    assert len(recorder.ttft_s) == len(recorder.latency_s) == 25
    assert recorder.hit_tokens <= recorder.infinite_hit_tokens
    assert num_blocks == 210 or recorder.preemptions == 0
    check_nothing_is_left(result)


def crowd() -> list[TraceRequest]:
    """Eight requests that begin with 32 blocks each and end with 70."""
    return [TraceRequest(10 * i, 512, 600, (i,)) for i in range(8)]


def test_preempted_requests_end_with_all_their_tokens() -> None:
    result = replay(crowd(), num_blocks=150)
    assert result.recorder.preemptions > 0
    assert result.recorder.output_tokens == 8 * 600
    assert result.recorder.requests == len(result.recorder.ttft_s) == 8
    check_nothing_is_left(result)


def test_equal_runs_are_equal() -> None:
    first, second = replay(crowd(), num_blocks=150), replay(crowd(), num_blocks=150)
    assert first.recorder.samples == second.recorder.samples
    assert first.recorder.ttft_s == second.recorder.ttft_s
    assert first.recorder.preemptions == second.recorder.preemptions > 0
    assert first.residencies == second.residencies


def test_bounds_of_a_step_hold() -> None:
    result = replay(random_trace(2, 60, max_output=300), num_blocks=5_000)
    assert result.recorder.max_running == BATCHING.max_num_seqs
    assert result.recorder.max_waiting > 0


def test_time_of_one_request_is_the_speed_models() -> None:
    """600 prompt tokens in chunks of 256, 256 and 88; the first token with the last chunk, then two decodes."""
    speed = SpeedModel(
        prefill_tokens_per_s=1_000,
        step_overhead_ms=1,
        decode_base_ms=10,
        decode_us_per_request=100,
        decode_ns_per_kv_token=1_000,
    )
    result = replay([TraceRequest(2_000, 600, 3, (0, 1))], speed=speed)
    prefill = 3 * 0.001 + 0.600
    decodes = 2 * (0.001 + 0.010 + 0.0001) + (601 + 602) * 1e-6
    assert result.recorder.ttft_s == pytest.approx([prefill])
    assert result.recorder.latency_s == pytest.approx([prefill + decodes])
    assert result.virtual_seconds == pytest.approx(2 + prefill + decodes)
    assert len(result.recorder.host_ns) == 5
    assert result.recorder.computed_tokens == 602


def test_a_request_without_outputs_ends_with_its_prompt() -> None:
    result = replay([TraceRequest(0, 600, 0, (0, 1))])
    assert result.recorder.output_tokens == 0
    assert result.recorder.ttft_s == result.recorder.latency_s
    check_nothing_is_left(result)


def test_a_second_turn_hits_the_first() -> None:
    trace = [TraceRequest(0, 1024, 4, (0, 1)), TraceRequest(60_000, 1300, 4, (0, 1, 2))]
    recorder = replay(trace).recorder
    assert recorder.hit_tokens == recorder.infinite_hit_tokens == 1024
    assert recorder.computed_tokens == 1024 + 3 + (1300 - 1024) + 3


@pytest.mark.parametrize("length", [4096, 3072])
def test_what_can_never_fit_is_refused(length: int) -> None:
    """A prompt larger than the pool, and one that would outgrow it, before they run; others are served."""
    small = TraceRequest(0, 512, 8, (0,))
    large = TraceRequest(1, length, 1500, tuple(range(10, 10 + length // 512)))
    result = replay([small, large, replace(small, timestamp_ms=2)], num_blocks=200)
    assert result.recorder.refused == 1
    assert len(result.recorder.latency_s) == 2
    assert result.recorder.prompt_tokens == 1024
    assert result.recorder.preemptions == 0
    check_nothing_is_left(result)


def test_windowed_layers_run_too() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=100)
    specs = full(16) | {f"layers.{i}": window for i in range(2, 12)}
    trace = random_trace(5, 40, max_output=100)
    result = replay(trace, specs=specs, num_blocks=5_000)
    assert result.recorder.output_tokens == sum(request.output_length for request in trace)
    assert 0 < result.recorder.hit_tokens <= result.recorder.infinite_hit_tokens
    check_nothing_is_left(result)


def test_samples_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.replay.recorder.MAX_SAMPLES", 16)
    few = replay(random_trace(0, 40, max_output=200)).recorder
    times = [sample.time_s for sample in few.samples]
    assert 8 <= len(times) < 16
    assert times == sorted(times)
    monkeypatch.setattr("kvjax.replay.recorder.MAX_SAMPLES", 1_000_000)
    all_steps = replay(random_trace(0, 40, max_output=200)).recorder
    assert len(all_steps.samples) == len(all_steps.host_ns)
    assert few.max_held_blocks == max(sample.held_blocks for sample in all_steps.samples)
    assert few.max_running == max(sample.running for sample in all_steps.samples)
    assert few.max_waiting == max(sample.waiting for sample in all_steps.samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0}, "expected max_num_seqs >= 1, got 0"),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, r"max_num_batched_tokens >= max_num_seqs = 8 .* got 7"),
    ],
)
def test_bad_bounds_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchingConfig(**arguments)


@pytest.mark.parametrize(
    "name", ["step_overhead_ms", "decode_base_ms", "decode_us_per_request", "decode_ns_per_kv_token"]
)
def test_negative_times_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} >= 0, got -1"):
        SpeedModel(**{name: -1})


def test_no_prefill_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="expected prefill_tokens_per_s > 0, got 0"):
        SpeedModel(prefill_tokens_per_s=0)
