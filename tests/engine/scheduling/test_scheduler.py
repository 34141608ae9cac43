"""Laws of the scheduler, with a fake model that notices lost or misplaced KV. No jax."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    Request,
    SinkFullAttentionSpec,
)
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.outputs import FinishReason
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.admission import RETRY_STEPS
from kvjax.engine.scheduling.scheduled_step import ScheduledStep
from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvjax.engine.step.sampled_step import SampledStep
from tests.engine.fake_model import BLOCK_SIZE, VOCAB, FakeEngine, expected_output

Workload = list[tuple[str, list[int], int]]


def workload(seed: int, num_requests: int = 12) -> Workload:
    """Prompts of which many share a prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, VOCAB, 20).tolist() for _ in range(2)]
    requests = []
    for i in range(num_requests):
        prefix = prefixes[i % 2][: int(rng.integers(0, 21))]
        prompt = prefix + rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()
        requests.append((f"r{i}", prompt, int(rng.integers(1, 12))))
    return requests


def run(requests: Workload, **kwargs: object) -> FakeEngine:
    engine = FakeEngine(**kwargs)  # type: ignore[arg-type]
    for request in requests:
        engine.add(*request)
    engine.run()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_limits_of_a_step_hold(depth: int) -> None:
    engine = FakeEngine(depth=depth, max_num_seqs=3, max_num_batched_tokens=10)
    for request in workload(0):
        engine.add(*request)
    while engine.scheduler.num_unfinished:
        engine.step()
        assert len(engine.scheduler.running) <= 3
    assert max(int(step.num_new_tokens.sum()) for step in engine.steps) == 10
    assert all((step.num_new_tokens >= 1).all() for step in engine.steps)


def test_requests_are_admitted_in_order_of_submission() -> None:
    engine = run(workload(1), max_num_seqs=2)
    admitted = [request.request_id for step in engine.steps for request in step.admitted]
    assert admitted == [f"r{i}" for i in range(12)]


def test_steps_hold_one_token_requests_first() -> None:
    for step in run(workload(2)).steps:
        is_longer = step.num_new_tokens != 1
        assert (np.sort(is_longer) == is_longer).all()


def test_the_latest_admitted_is_preempted_first_and_readmitted_first() -> None:
    engine = FakeEngine(num_blocks=30, max_num_batched_tokens=32)
    for i in range(4):
        engine.add(f"r{i}", list(range(i, i + 12)), 30)
    order = []
    while engine.scheduler.num_unfinished:
        before = [request.request_id for request in engine.scheduler.running]
        engine.step()
        preempted = [name for name in before if engine.requests[name].status is RequestStatus.WAITING]
        assert preempted == before[len(before) - len(preempted) :]
        order += preempted
    assert order
    assert all(engine.requests[name].stats.num_preemptions for name in order)


def test_repeated_prompts_hit_and_count() -> None:
    prompt = list(range(20))
    engine = FakeEngine()
    engine.add("a", prompt, 3)
    engine.run()
    engine.add("b", prompt, 3)
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"]
    first, second = (engine.requests[name].stats for name in "ab")
    assert (first.num_cached_tokens, first.num_computed_tokens) == (0, 22)
    assert (second.num_cached_tokens, second.num_computed_tokens) == (16, 6)
    assert engine.steps[-3].lookups.hits == 16
    assert engine.steps[-3].lookups.queries == 20


def test_a_request_that_fits_the_pool_but_not_beside_the_sinks_is_refused() -> None:
    """Sinks take blocks for good, so such a request would wait for ever."""
    spec = SinkFullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sink_len=8)
    manager = KVCacheManager(KVCacheConfig.single_pool(12, spec), 128, 4)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128))
    for num_tokens in (44, 40, 37):  # 11 or 10 blocks; the pool has 11 beside the null block, 9 of them to use
        with pytest.raises(ValueError, match=r"request a: \d+ tokens need 1[01] blocks of pool 0, which has 9 beside"):
            scheduler.add(request_of("a", num_tokens - 1))
    assert scheduler.num_unfinished == 0
    scheduler.add(request_of("a", 35))
    step = scheduler.schedule()
    assert step is not None
    assert step.num_new_tokens.tolist() == [35]


def request_of(request_id: str, num_prompt_tokens: int, max_tokens: int = 1) -> EngineRequest:
    prompt = np.random.default_rng(num_prompt_tokens).integers(0, VOCAB, num_prompt_tokens)
    return EngineRequest(
        request=Request(request_id, prompt, block_hasher=BlockHasher(4, seed="0")),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=frozenset(),
        arrival=0,
        stats=RequestStats(request_id, num_prompt_tokens, 0.0),
    )


def note_lookups(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(id, free blocks) of each request that is looked up from here on."""
    looked_up: list[tuple[str, int]] = []
    look_up = engine.manager.get_computed_blocks

    def noted(request: Request) -> tuple[KVCacheBlocks, int]:
        looked_up.append((request.request_id, engine.manager.block_pool.num_free_blocks))
        return look_up(request)

    monkeypatch.setattr(engine.manager, "get_computed_blocks", noted)
    return looked_up


@pytest.mark.parametrize("watermark", [0.0, 0.4])
def test_a_request_that_waits_for_blocks_is_not_looked_up_before_some_are_freed(
    watermark: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody stops, only when more blocks are free than when it was refused (here: a window slid)."""
    engine = FakeEngine(num_blocks=56, watermark=watermark, max_num_batched_tokens=128)
    engine.add("a", list(range(40)), 30)
    engine.add("b", list(range(200, 300)), 4)
    looked_up = note_lookups(engine, monkeypatch)
    while engine.requests["a"].status is not RequestStatus.FINISHED:
        assert engine.requests["b"].stats.num_cached_tokens is None
        engine.step()
    free = [num_free for name, num_free in looked_up if name == "b"]
    assert free == sorted(set(free))
    assert 1 <= len(free) <= 4
    engine.step()
    assert engine.requests["b"].status is RequestStatus.RUNNING
    engine.run()


def test_a_request_that_waits_is_looked_up_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it shares with a running request may be cached by then, so that it needs fewer blocks."""
    engine = FakeEngine()
    engine.add("a", [1, 2], 100)
    engine.step()
    engine.add("b", [5, 6], 4)
    looked_up = note_lookups(engine, monkeypatch)
    monkeypatch.setattr(engine.manager, "allocate_slots", lambda *args, **options: None)
    for _ in range(2 * RETRY_STEPS):
        engine.step()
    assert [name for name, _ in looked_up] == ["b", "b"]


def test_the_next_request_is_looked_up_when_the_one_that_waited_is_aborted() -> None:
    engine = FakeEngine(num_blocks=48, max_num_batched_tokens=128)
    engine.add("a", list(range(60)), 20)
    engine.add("b", list(range(100, 160)), 20)
    engine.add("c", [1, 2, 3], 2)
    for _ in range(6):
        engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.loop.abort("b")
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "c"]
    engine.run()


def test_the_watermark_is_void_as_soon_as_nothing_runs_whatever_is_freed() -> None:
    """All blocks of the request that ends but one are pinned, so no more are free than when the other was refused."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(KVCacheConfig.single_pool(20, spec), 128, 4)
    limits = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, watermark=0.5)
    scheduler = Scheduler(manager, limits)
    first, second = request_of("a", 40, max_tokens=2), request_of("b", 12)
    second.arrival = 1
    scheduler.add(first)
    scheduler.add(second)
    prefix = Request("longer", [*first.request.token_ids, 1], block_hasher=first.request.block_hasher)

    def step() -> list[str]:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        scheduler.start(scheduled)
        sampled = np.full(scheduled.rows.size, 7, np.int32)
        scheduler.update(scheduled, sampled, sampled.astype(np.float32))
        return list(scheduled.request_ids)

    assert step() == ["a"]
    num_free = manager.block_pool.num_free_blocks
    assert manager.pin(prefix, longest_request=32) is not None
    assert step() == ["a"]
    assert first.status is RequestStatus.FINISHED
    assert manager.block_pool.num_free_blocks == num_free
    assert step() == ["b"]


def test_windows_keep_what_tokens_in_flight_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is planned with the tokens of the steps that are not read yet."""
    engine = FakeEngine(depth=2, max_num_batched_tokens=9)
    plan_step, seen = engine.manager.plan_step, []

    def checked(rows: np.ndarray, *args: object, num_in_flight_tokens: np.ndarray | int) -> object:
        counts = np.broadcast_to(num_in_flight_tokens, rows.shape).tolist()
        unread = [dict(zip(step.rows.tolist(), step.num_new_tokens, strict=True)) for step in unread_steps(engine)]
        assert counts == [sum(step.get(row, 0) for step in unread) for row in rows.tolist()]
        seen.extend(counts)
        return plan_step(rows, *args, num_in_flight_tokens=num_in_flight_tokens)

    monkeypatch.setattr(engine.manager, "plan_step", checked)
    for request in workload(5):
        engine.add(*request)
    engine.run()
    assert set(seen) > {1, 2}


def unread_steps(engine: FakeEngine) -> list[ScheduledStep]:
    return [step.scheduled for step, _ in engine._flights]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [34, 48])
def test_remembering_a_refusal_changes_no_schedule(
    depth: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shared prefixes, steps are those of a scheduler that asks every time; preemptions and aborts included."""
    refusals = 0

    def schedules(requests: Workload, forgets: bool) -> list[list[tuple[str, int]]]:
        nonlocal refusals
        engine = FakeEngine(num_blocks, depth=depth, max_num_batched_tokens=12, watermark=0.1, enable_caching=False)
        for request in requests:
            engine.add(*request)
        for i in range(400):
            if forgets:
                engine.scheduler._admission.refusal = None
            if i == 9:
                engine.scheduler.abort(engine.requests["r0"])
            if i == 15 and engine.scheduler.num_running > 1:
                engine.scheduler.preempt_last()
            engine.step()
            refusals += engine.scheduler._admission.refusal is not None
        assert not engine.scheduler.num_unfinished
        return [list(zip(step.request_ids, step.num_new_tokens.tolist(), strict=True)) for step in engine.steps]

    for seed in range(6):
        requests = [(name, prompt, 20) for name, prompt, _ in workload(seed)]
        assert schedules(requests, forgets=False) == schedules(requests, forgets=True)
    assert refusals > 50


def test_a_running_request_is_aborted_in_any_order() -> None:
    engine = FakeEngine(num_blocks=300, max_num_seqs=40, max_num_batched_tokens=80)
    for i in range(40):
        engine.add(f"r{i}", [i, i + 1], 9)
    engine.step()
    left = [f"r{i}" for i in range(40)]
    for i in np.random.default_rng(0).permutation(40).tolist():
        result = engine.loop.abort(f"r{i}")
        left.remove(f"r{i}")
        assert [request.request_id for request in engine.scheduler.running] == left
        assert (result.output_token_ids.size, len(result.logprobs)) == (1, 1)
        engine.scheduler.check_invariants()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_more", [0, 2, 20])
def test_any_number_of_stop_tokens_works(depth: int, num_more: int) -> None:
    """Ids that no token can have are ignored."""
    prompt = [1, 2, 3]
    expected = expected_output(prompt, 10)
    others = tuple(token for token in range(VOCAB) if token not in expected)[:num_more]
    engine = FakeEngine(depth=depth)
    engine.add("a", prompt, 10, stop_token_ids=(-1, 2**31 - 1, *others, expected[4]))
    engine.add("b", prompt, 10, stop_token_ids=others)
    engine.run()
    assert engine.outputs == {"a": expected[:5], "b": expected}
    assert [engine.results[name].finish_reason for name in "ab"] == [FinishReason.STOP, FinishReason.LENGTH]


def test_the_watermark_holds_admissions_back_but_not_the_first() -> None:
    engine = FakeEngine(num_blocks=41, watermark=0.5, max_num_batched_tokens=64)
    engine.add("a", list(range(60)), 2)  # 30 of 40 blocks for both groups: more than half of the pool
    engine.add("b", list(range(100, 104)), 2)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.run()
    assert len(engine.outputs["b"]) == 2


def test_released_blocks_are_counted() -> None:
    engine = FakeEngine(num_blocks=64)
    engine.add("a", [1, 2, 3], 40)
    engine.run()
    num_tokens = 3 + 39
    last_release = (num_tokens - 1 - 6 + 1) // BLOCK_SIZE
    assert sum(step.num_released[0] for step in engine.steps) == last_release


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_can_never_run_are_refused(depth: int) -> None:
    engine = FakeEngine(num_blocks=20, depth=depth, max_num_batched_tokens=8)
    with pytest.raises(
        ValueError, match=r"request a: expected prompt and max_tokens of at most 128 tokens .* 100 \+ 29"
    ):
        engine.add("a", list(range(100)), 29)
    with pytest.raises(ValueError, match=r"request b: 61 tokens need \d+ blocks of pool 0, which has 19"):
        engine.add("b", list(range(60)), 1)
    assert engine.scheduler.num_unfinished == 0
    assert engine.scheduler.schedule() is None
    with pytest.raises(ValueError, match="a request that runs or loads to preempt, got none"):
        engine.scheduler.preempt_last()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_names_the_requests_that_run_in_its_rows_whoever_ran_there_before(depth: int) -> None:
    """Steps of the same requests share columns, which nobody can write; a request that comes into a row has its own."""
    engine = FakeEngine(num_blocks=200, depth=depth, max_num_seqs=1)
    engine.add("a", [1, 2, 3], 4)
    engine.add("b", [1, 2, 3], 4)
    engine.run()
    names = [step.request_ids.tolist() for step in engine.steps]
    assert names == [["a"]] * 4 + [["b"]] * 4
    for step in engine.steps:
        assert [request.request_id for request in step.requests] == step.request_ids.tolist()
        assert not step.requests.flags.writeable
        assert not step.request_ids.flags.writeable


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_is_aborted_between_plan_and_dispatch_leaves_hits_that_are_written(depth: int) -> None:
    """The step that names it is dispatched all the same, and its token is dropped."""
    engine, prompt = FakeEngine(depth=depth), list(range(30, 43))
    engine.add("a", prompt, 4)
    engine.add("other", prompt[::-1], 4)
    step = engine.loop.begin_step()
    assert step is not None
    assert engine.loop.abort("a").output_token_ids.size == 0
    token_ids = engine.device.run(step.plan).token_ids
    outputs = engine.loop.end_step(step, SampledStep(token_ids, np.zeros(token_ids.size, np.float32)))
    assert "a" not in outputs.request_ids
    engine.add("b", prompt, 4)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.outputs["b"] == expected_output(prompt, 4)
    assert engine.requests["b"].stats.num_cached_tokens == 12
