"""After any exception the engine serves the next request, loses none that was queued, and none of their tokens.

The laws, wherever a step is broken off: manager and scheduler hold theirs at once; going on, every request gets each of
its tokens once, those of a run without exceptions; no block is leaked; and prefixes cached since are right.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.engine import FinishReason, LLMEngine, SamplingParams
from kvjax.engine.sampling.sampler import sample
from kvjax.engine.scheduling.speculation import SpeculativeConfig
from kvjax.errors import EngineClosedError
from tests.engine.engines import AMPLE_BLOCKS, FEW_BLOCKS, assert_no_leak, base_config, golden_prompts, loaded
from tests.engine.engines import make_engine as make_text_engine
from tests.engine.failures import interrupted_at_lines, plant
from tests.engine.requests.input_engines import InputRequest, add, assert_all_greedy, random_tokens
from tests.engine.requests.input_engines import make_engine as make_input_engine
from tests.engine.requests.test_encoder_inputs import features_of
from tests.engine.requests.test_encoder_inputs import request_of as encoder_request_of
from tests.engine.requests.test_vector_inputs import request_of as vector_request_of
from tests.engine.requests.test_vector_inputs import vectors

NAME = "llama"
UPDATE_STEP = "kvjax.device.steps.update_step"
DEVICE_CALLS = (
    f"{UPDATE_STEP}.UpdateStep.__call__",
    f"{UPDATE_STEP}.edit_pages",
    f"{UPDATE_STEP}.DeviceBatch.from_plan",
    "kvjax.engine.step.model_runner.ModelRunner.dispatch",
    "kvjax.engine.step.model_runner.ModelRunner.read",
)
EDIT_CALLS = ("kvjax.device.pages.page_edits.copy_pages", "kvjax.device.pages.page_edits.zero_pages")
HOST_CALLS = (
    "kvjax.engine.scheduling.scheduler.Scheduler.schedule",
    "kvjax.engine.scheduling.scheduler.Scheduler.start",
    "kvjax.engine.scheduling.scheduler.Scheduler.update",
    "kvjax.engine.step.host_loop.build_step_plan",
    "kvjax.engine.step.host_loop.HostLoop.begin_step",
    "kvjax.engine.step.host_loop.HostLoop.end_step",
    "kvjax.engine.sampling.sampling_table.SamplingTable.batch",
    "kvjax.core.manager.kv_cache_manager.KVCacheManager.plan_step",
    "kvjax.core.manager.kv_cache_manager.KVCacheManager.allocate_slots",
    "kvjax.core.manager.kv_cache_manager.KVCacheManager.free",
    "kvjax.core.requests.request_table.RequestTable.append_tokens",
    "kvjax.core.requests.request_table.RequestTable.open_step",
    "kvjax.core.requests.request_table.RequestTable.close_step",
)
NUM_REQUESTS = 6
ERRORS = {0: RuntimeError, 3: KeyboardInterrupt, 6: RuntimeError}  # by the number of the call


def make_engine(async_scheduling: bool, **settings: Any) -> LLMEngine:
    """Room for two or three of the requests at once: others wait, and some are preempted."""
    settings = {"num_blocks": FEW_BLOCKS[NAME], "watermark": 0.0, **settings}
    return make_text_engine(NAME, async_scheduling=async_scheduling, **settings)


def params_of(i: int) -> SamplingParams:
    """Odd ones are two samples of their prompt."""
    return SamplingParams(n=1 + i % 2, max_tokens=20 + i, temperature=0.8 * (i % 3), seed=i)


def queue_all(engine: LLMEngine) -> list[str]:
    ids = []
    for i, prompt in enumerate(golden_prompts(NAME)[:NUM_REQUESTS]):
        first = engine.add_request(prompt, params_of(i), request_id=f"r{i}")
        ids += [first, f"{first}.1"][: params_of(i).n]
    return ids


def step_until_idle(engine: LLMEngine, tokens: dict[str, list[int]], results: dict[str, Any]) -> None:
    while engine.num_unfinished or engine._runner.num_in_flight or engine._loop.undelivered:
        take(engine, tokens, results)


def take(engine: LLMEngine, tokens: dict[str, list[int]], results: dict[str, Any]) -> None:
    for output in engine.step():
        tokens[output.request_id].append(output.token_id)
        if output.result is not None:
            assert output.request_id not in results
            results[output.request_id] = output.result


def test_without_exceptions_some_are_preempted() -> None:
    for async_scheduling in (False, True):
        engine = make_engine(async_scheduling)
        assert_serves(engine)
        assert sum(stats.num_preemptions for stats in engine.step_stats) > 1


@functools.cache
def expected_tokens() -> dict[str, list[int]]:
    engine = make_engine(False, num_blocks=AMPLE_BLOCKS)
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    step_until_idle(engine, tokens, {})
    return tokens


def assert_all_as_expected(engine: LLMEngine, tokens: dict[str, list[int]], results: dict[str, Any]) -> None:
    assert tokens == expected_tokens()
    for name, result in results.items():
        assert result.output_token_ids.tolist() == tokens[name]
        assert len(result.logprobs) == len(tokens[name])
        assert result.finish_reason is FinishReason.LENGTH
    assert set(results) == set(tokens)
    assert_no_leak(engine)


def assert_serves(engine: LLMEngine) -> None:
    """The same prompts again, from what is cached by now."""
    assert_no_leak(engine)
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    results: dict[str, Any] = {}
    step_until_idle(engine, tokens, results)
    assert_all_as_expected(engine, tokens, results)


def check_broken_steps(engine: LLMEngine, num_raised: Callable[[], int], num_planted: int = len(ERRORS)) -> None:
    """As many exceptions come out of the steps as were planted."""
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    results: dict[str, Any] = {}
    for count in range(1, num_planted + 1):
        with pytest.raises((RuntimeError, KeyboardInterrupt), match="planted"):
            step_until_idle(engine, tokens, results)
        assert num_raised() == count
        engine.check_invariants()
        waiting_to_be_told = engine._loop.undelivered
        if waiting_to_be_told is None:
            assert engine.num_unfinished + len(results) == len(tokens)
        assert engine.manager.usage == 0
    step_until_idle(engine, tokens, results)
    assert_all_as_expected(engine, tokens, results)
    assert_serves(engine)


# Before a call or after it, in engines that read a step before the next or not; two of the four outside sweeps.
WHENEVER = pytest.mark.parametrize(
    ("when", "async_scheduling"),
    [
        ("before", False),
        ("after", True),
        pytest.param("before", True, marks=pytest.mark.sweep),
        pytest.param("after", False, marks=pytest.mark.sweep),
    ],
)


def test_the_id_of_a_request_whose_end_nobody_has_heard_of_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next step would return its result as that of the other one."""
    engine = make_engine(async_scheduling=False)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=1), request_id="a")
    with monkeypatch.context() as patch:
        plant(patch, "kvjax.engine.step.host_loop.HostLoop.end_step", {0: RuntimeError}, "after")
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
    assert engine.num_unfinished == 0
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request([4], request_id="a")
    assert [result.request_id for result in engine.step().results.values()] == ["a"]
    engine.add_request([4], SamplingParams(max_tokens=1), request_id="a")
    step_until_idle(engine, {"a": []}, {})


@pytest.mark.parametrize(
    "target", ["kvjax.engine.step.host_loop.build_step_plan", "kvjax.engine.step.model_runner.ModelRunner.dispatch"]
)
def test_what_an_undispatched_step_would_have_computed_is_no_hit(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(async_scheduling=False)
    queue_all(engine)
    with monkeypatch.context() as patch:
        plant(patch, target, {0: RuntimeError}, "before")
        with pytest.raises(RuntimeError):
            engine.step()
    assert [pool.num_hashed_blocks for pool in engine.manager.block_pools] == [0] * len(engine.manager.block_pools)
    tokens: dict[str, list[int]] = {name: [] for name in engine._loop.requests}
    results: dict[str, Any] = {}
    step_until_idle(engine, tokens, results)
    assert tokens == expected_tokens()


@WHENEVER
@pytest.mark.parametrize("target", DEVICE_CALLS + HOST_CALLS)
def test_a_step_that_is_broken_off_is_undone(
    target: str, when: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(async_scheduling)
    check_broken_steps(engine, plant(monkeypatch, target, ERRORS, when))


@WHENEVER
@pytest.mark.parametrize("target", EDIT_CALLS)
def test_pages_that_were_being_edited_are_made_anew(
    target: str, when: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(async_scheduling, zero_new_pages=True, num_blocks=AMPLE_BLOCKS)
    check_broken_steps(engine, plant(monkeypatch, target, {1: KeyboardInterrupt}, when), 1)


@functools.cache
def drafting_base(method: Any) -> LLMEngine:
    """Holds the compiled step with drafts; the model drafts for itself."""
    speculative = SpeculativeConfig(method=method, num_drafts=3)
    config = base_config(NAME, num_blocks=FEW_BLOCKS[NAME], watermark=0.0, speculative=speculative)
    return LLMEngine(loaded(NAME), config, draft_model=loaded(NAME) if method == "draft_model" else None)


def make_drafting_engine(method: Any, async_scheduling: bool) -> LLMEngine:
    base = drafting_base(method)
    config = dataclasses.replace(base.config, async_scheduling=async_scheduling)
    draft_model = loaded(NAME) if method == "draft_model" else None
    return LLMEngine(loaded(NAME), config, draft_model=draft_model, like=base)


DRAFT_CALLS = (
    ("prompt_lookup", "kvjax.engine.drafts.prompt_lookup.PromptLookup.propose"),
    ("prompt_lookup", "kvjax.engine.drafts.prompt_lookup.PromptLookup.settle"),
    ("prompt_lookup", "kvjax.core.manager.kv_cache_manager.KVCacheManager.settle_drafts"),
    ("prompt_lookup", "kvjax.engine.scheduling.draft_shares.DraftShares.allocate"),
    ("prompt_lookup", "kvjax.engine.step.host_loop.HostLoop._propose"),
    ("prompt_lookup", "kvjax.engine.scheduling.token_delivery.TokenDelivery._give"),
    ("prompt_lookup", "kvjax.engine.scheduling.token_delivery.TokenDelivery._tell_drafter"),
    ("prompt_lookup", DEVICE_CALLS[0]),
    ("prompt_lookup", HOST_CALLS[2]),
    ("draft_model", "kvjax.engine.drafts.draft_model.DraftModel.propose"),
    ("draft_model", "kvjax.engine.drafts.draft_model.DraftModel.settle"),
    ("draft_model", DEVICE_CALLS[0]),
    ("draft_model", HOST_CALLS[2]),
)


@WHENEVER
@pytest.mark.parametrize(("method", "target"), DRAFT_CALLS)
def test_a_step_with_drafts_that_is_broken_off_is_undone(
    method: str, target: str, when: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_drafting_engine(method, async_scheduling)
    check_broken_steps(engine, plant(monkeypatch, target, {0: RuntimeError, 3: KeyboardInterrupt}, when), 2)


@pytest.mark.parametrize("kind", ["sync", "async", "prompt_lookup", "draft_model"])
@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_between_any_two_lines_of_a_step_loses_nothing(seed: int, kind: str) -> None:
    """Ten times in a run, at random lines of random steps; a second one may come while the first is handled."""
    rng = np.random.default_rng(seed)
    engine = make_engine(kind == "async") if kind.endswith("sync") else make_drafting_engine(kind, bool(seed % 2))
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    results: dict[str, Any] = {}
    num_interrupts = 0
    for _ in range(10):
        for _ in range(rng.integers(0, 6)):
            take(engine, tokens, results)
        outputs: Any = ()
        try:
            first = int(10 ** rng.uniform(0, 3.3))
            with interrupted_at_lines(first, first + int(10 ** rng.uniform(0, 3))):
                outputs = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            engine._core.recover()
            engine.check_invariants()
        for output in outputs:
            tokens[output.request_id].append(output.token_id)
            if output.result is not None:
                results[output.request_id] = output.result
    step_until_idle(engine, tokens, results)
    assert num_interrupts > 2
    assert_all_as_expected(engine, tokens, results)
    assert_serves(engine)


@pytest.mark.parametrize("how", ["generate", "stream"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("target", [DEVICE_CALLS[0], DEVICE_CALLS[-1], HOST_CALLS[0], HOST_CALLS[2]])
def test_a_call_that_is_broken_off_leaves_none_of_its_requests(
    target: str, async_scheduling: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = golden_prompts(NAME)[:NUM_REQUESTS]
    params = [params_of(i) for i in range(NUM_REQUESTS)]
    engine = make_engine(async_scheduling)
    for number, error in ((0, KeyboardInterrupt), (7, RuntimeError)):
        with monkeypatch.context() as patch:
            plant(patch, target, {number: error}, "after")
            with pytest.raises(error):
                list(engine.stream(prompts, params) if how == "stream" else engine.generate(prompts, params))
        assert_no_leak(engine)
        tokens = [result.output_token_ids.tolist() for result in engine.generate(prompts, params)]
        assert tokens == list(expected_tokens().values())


@pytest.mark.parametrize("seed", range(10))
def test_an_interrupt_between_any_two_lines_of_a_call_leaves_none_of_its_requests(seed: int) -> None:
    """Queueing the prompts and cleaning up included. The next call may be the one that ends the cleaning."""
    rng = np.random.default_rng(seed)
    engine = make_engine(bool(seed % 2))
    prompts = golden_prompts(NAME)[:3]
    params = [params_of(i) for i in range(3)]
    num_interrupts = 0
    for _ in range(4):
        try:
            first = int(10 ** rng.uniform(0, 4.3))
            with interrupted_at_lines(first, first + int(10 ** rng.uniform(0, 3))):
                if rng.integers(2):
                    engine.generate(prompts, params)
                else:
                    for i, _ in enumerate(engine.stream(prompts, params)):
                        if i == 9:
                            break
        except KeyboardInterrupt:
            num_interrupts += 1
    tokens = [result.output_token_ids.tolist() for result in engine.generate(prompts, params)]
    assert tokens == list(expected_tokens().values())[: len(tokens)]
    assert num_interrupts
    assert_serves(engine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_warmup_that_is_broken_off_leaves_pages_to_serve_with(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(True)
    queued = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    plant(monkeypatch, f"{UPDATE_STEP}.UpdateStep.warmup", {0: KeyboardInterrupt}, when)
    with pytest.raises(KeyboardInterrupt):
        engine.warmup()
    assert engine.abort(queued).finish_reason is FinishReason.ABORT
    assert_serves(engine)


def test_a_sampler_that_raises_leaves_an_engine_that_serves() -> None:
    """The function is traced in the first step of a shape; what it raises comes out of the step."""
    is_failing = True

    def failing(logits: Any, batch: Any, *more: Any) -> Any:
        if is_failing:
            raise RuntimeError("planted")
        return sample(logits, batch, *more)

    engine = LLMEngine(loaded(NAME), base_config(NAME), sample_fn=failing)
    ids = queue_all(engine)
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
    is_failing = False
    results: dict[str, Any] = {}
    step_until_idle(engine, tokens, results)
    assert_all_as_expected(engine, tokens, results)


INPUTS = {
    "encoder": [encoder_request_of(random_tokens(seed, 6 + seed), features_of(seed)) for seed in range(4)],
    "vectors": [
        vector_request_of("vectors", [random_tokens(seed, 4), vectors(seed, 3 + seed), random_tokens(seed + 9, 3)])
        for seed in range(4)
    ],
}


@WHENEVER
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("encoder", "kvjax.device.encoder.encoder_step.EncoderStep.__call__"),
        ("vectors", "kvjax.engine.step.model_runner.EmbedBuffer.write"),
        ("vectors", "kvjax.engine.scheduling.running_inputs.RunningInputs.take"),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_inputs_beside_tokens_are_given_again(
    kind: str, target: str, number: int, when: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[InputRequest] = INPUTS[kind]
    engine = make_input_engine(kind, async_scheduling=async_scheduling)
    ids = add(engine, requests)
    num_raised = plant(monkeypatch, target, {number: RuntimeError}, when)
    results: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    with pytest.raises(RuntimeError):
        step_until_idle(engine, tokens, results)
    assert num_raised() == 1
    engine.check_invariants()
    step_until_idle(engine, tokens, results)
    assert_no_leak(engine)
    assert_all_greedy(kind, requests, [results[name] for name in ids])
    assert {name: result.output_token_ids.tolist() for name, result in results.items()} == tokens


def test_without_memory_for_pages_the_engine_says_that_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests stay; once there is memory again, it goes on."""
    engine = make_engine(True)
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    results: dict[str, Any] = {}
    take(engine, tokens, results)
    with monkeypatch.context() as patch:
        plant(patch, DEVICE_CALLS[0], {0: RuntimeError}, "after")

        def no_memory(*args: object) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED")

        patch.setattr("kvjax.engine.step.model_runner.create_pages", no_memory)
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
        for call in (engine.step, lambda: engine.generate([[1]]), lambda: engine.add_request([1]), engine.reset):
            with pytest.raises(EngineClosedError, match=r"closed: .* \(RESOURCE_EXHAUSTED\); call reset\(\) when"):
                call()
    step_until_idle(engine, tokens, results)
    assert_all_as_expected(engine, tokens, results)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reset_ends_all_requests_and_forgets_the_cache(async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling)
    tokens: dict[str, list[int]] = {name: [] for name in queue_all(engine)}
    for _ in range(12):
        take(engine, tokens, {})
    results = engine.reset()
    assert {result.request_id for result in results} <= set(tokens)
    for result in results:
        assert result.finish_reason is FinishReason.ABORT
        assert result.output_token_ids.tolist() == tokens[result.request_id]
        assert len(result.logprobs) == result.output_token_ids.size
    assert_no_leak(engine)
    assert engine.generate([golden_prompts(NAME)[0]])[0].stats.num_cached_tokens == 0
    assert engine.reset() == []
    assert_serves(engine)
