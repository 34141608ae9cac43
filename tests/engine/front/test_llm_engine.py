"""Laws of the engine beside greedy tokens: samples, statistics, compilation, aliases, aborts, refusals."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from kvjax.core import MissReason
from kvjax.core.eviction import LRUPolicy
from kvjax.core.options.release_rules import RELEASES
from kvjax.device import count_compilations
from kvjax.engine import EngineConfig, FinishReason, LLMEngine, SamplingParams
from kvjax.errors import MemoryBudgetError, UnknownRequestError
from tests.engine.engines import (
    AMPLE_BLOCKS,
    FEW_BLOCKS,
    assert_greedy_is_golden,
    assert_no_leak,
    base_config,
    base_engine,
    golden_prompts,
    loaded,
    make_engine,
)

NAME = "llama"


def sampling(seed: int, **settings: float) -> SamplingParams:
    values = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "top_k": 40, **settings}
    return SamplingParams(seed=seed, **values)  # type: ignore[arg-type]


def sampled_tokens(order: list[int] | None = None, **settings: object) -> dict[int, list[int]]:
    """Tokens of the golden prompts, each with the seed of its number, in a run in `order`."""
    engine = make_engine(NAME, **settings)
    prompts = golden_prompts(NAME)
    order = list(range(len(prompts))) if order is None else order
    results = engine.generate([prompts[i] for i in order], [sampling(i) for i in order])
    assert_no_leak(engine)
    return {i: result.output_token_ids.tolist() for i, result in zip(order, results, strict=True)}


@pytest.fixture(scope="module")
def expected_samples() -> dict[int, list[int]]:
    return sampled_tokens(max_num_seqs=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"order": [5, 4, 3, 2, 1, 0], "max_num_seqs": 3},
        {"max_num_batched_tokens": 9},
        {"enable_prefix_caching": False},
        {"num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_blocks": FEW_BLOCKS[NAME], "max_num_batched_tokens": 16},
    ],
)
def test_samples_do_not_depend_on_the_schedule(
    expected_samples: dict[int, list[int]], settings: dict[str, object]
) -> None:
    assert sampled_tokens(**settings) == expected_samples  # type: ignore[arg-type]


def test_requests_without_a_seed_draw_from_the_engines() -> None:
    prompt, params = golden_prompts(NAME)[0], SamplingParams(max_tokens=16, temperature=2.0)
    runs = [make_engine(NAME, seed=seed).generate([prompt] * 3, params) for seed in (1, 1, 2)]
    tokens = [[tuple(result.output_token_ids.tolist()) for result in run] for run in runs]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0] + tokens[2])) == 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_long_run_of_mixed_requests_compiles_nothing(async_scheduling: bool) -> None:
    engine = LLMEngine(
        loaded("llama"),
        base_config(
            "llama", num_blocks=36, max_num_batched_tokens=32, max_buckets=3, async_scheduling=async_scheduling
        ),
    )
    compiled: list[int] = []
    engine.warmup(compiled.append)
    assert sum(compiled) == engine.num_buckets > 1
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 256, 60)
    prompts = [
        np.concatenate([prefix[: rng.integers(0, 60)], rng.integers(0, 256, rng.integers(1, 60))]) for _ in range(80)
    ]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 16)),
            temperature=float(rng.choice([0.0, 0.7])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 20])),
        )
        for _ in range(80)
    ]
    with count_compilations() as count:
        results = engine.generate(prompts, params)
    assert count.num_programs == 0
    assert [result.output_token_ids.size for result in results] == [one.max_tokens for one in params]
    assert sum(result.stats.num_preemptions for result in results) > 0
    assert sum(result.stats.num_cached_tokens or 0 for result in results) > 0
    assert_no_leak(engine)


def test_a_step_updates_the_pages_in_place() -> None:
    engine = make_engine(NAME)
    bucket = engine._runner.update_step.buckets.steps[0]
    nothing = np.zeros(0, np.int64)
    batch = engine._loop.sampling.batch(nothing, nothing)
    compiled = engine._runner.update_step.compiled(engine._runner.pages, bucket, sampling=batch)
    num_leaves = len(jax.tree.leaves(engine._runner.pages))
    header = compiled.as_text().split("\n", 1)[0]
    assert header.count("may-alias") + header.count("must-alias") == num_leaves
    assert compiled.memory_analysis().alias_size_in_bytes == engine._runner.pages.num_bytes


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_come_as_they_are_made(async_scheduling: bool) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling)
    prompts = golden_prompts(NAME)[:3]
    request_ids = [engine.add_request(prompt, sampling(i, max_tokens=4 + i)) for i, prompt in enumerate(prompts)]
    assert request_ids == ["request-0", "request-1", "request-2"]
    tokens: dict[str, list[int]] = {name: [] for name in request_ids}
    results = {}
    while engine.num_unfinished:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
            if output.result is not None:
                results[output.request_id] = output.result
    for i, name in enumerate(request_ids):
        result = results[name]
        assert result.output_token_ids.tolist() == tokens[name]
        assert len(result.logprobs) == len(tokens[name]) == 4 + i
        assert result.finish_reason is FinishReason.LENGTH
        np.testing.assert_array_equal(result.prompt_token_ids, prompts[i])
    engine.step()  # async: the step that was in flight for the last request
    assert len(engine.step()) == 0
    assert_no_leak(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_next_turn_finds_prompt_and_answer(async_scheduling: bool) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling)
    prompt = golden_prompts(NAME)[0]
    answer = engine.generate([prompt], sampling(0))[0].output_token_ids
    num_computed = prompt.size + answer.size - 1  # the last token was never an input
    turn = engine.generate([np.concatenate([prompt, answer, [1, 2, 3]])], sampling(1))[0]
    assert turn.stats.num_cached_tokens == num_computed // 8 * 8
    assert_no_leak(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_aborts_give_everything_back(async_scheduling: bool, num_steps: int) -> None:
    engine = make_engine(NAME, async_scheduling=async_scheduling)
    ids = [engine.add_request(prompt, sampling(0)) for prompt in golden_prompts(NAME)]
    for _ in range(num_steps):
        engine.step()
    results = [engine.abort(request_id) for request_id in ids]
    assert all(result.finish_reason is FinishReason.ABORT for result in results)
    assert max(result.output_token_ids.size for result in results) <= num_steps
    engine.step()
    assert_no_leak(engine)
    with pytest.raises(UnknownRequestError, match=f"unfinished request, got '{ids[0]}'"):
        engine.abort(ids[0])


def test_statistics_add_up() -> None:
    ticks = itertools.count(0.0, 1.0)
    engine = LLMEngine(loaded(NAME), base_config(NAME), like=base_engine(NAME, AMPLE_BLOCKS), clock=lambda: next(ticks))
    prompts = golden_prompts(NAME)
    results = engine.generate(prompts, sampling(0, max_tokens=5))
    steps = engine.step_stats
    assert sum(step.num_sampled_tokens for step in steps) == 5 * len(prompts)
    assert sum(step.num_new_tokens for step in steps) == sum(result.stats.num_computed_tokens for result in results)
    assert sum(step.num_queried_tokens for step in steps) == sum(prompt.size for prompt in prompts)
    assert sum(step.num_hit_tokens for step in steps) == sum(result.stats.num_cached_tokens or 0 for result in results)
    for step in steps:
        assert all(use.held + use.cached + use.free == AMPLE_BLOCKS - 1 for use in step.pools)
        assert step.host_us > 0
    assert steps[-1].pools[0].held == 0
    assert steps[-1].pools[0].cached > 0
    for result in results:
        stats = result.stats
        assert stats.num_output_tokens == 5
        assert stats.arrival_time_s < stats.first_token_time_s < stats.finish_time_s  # type: ignore[operator]
        assert stats.time_to_first_token_s > 0  # type: ignore[operator]
        assert stats.output_tokens_per_s > 0  # type: ignore[operator]


def test_every_token_of_a_prompt_is_found_shared_or_missed_for_a_reason() -> None:
    engine = make_engine(NAME, miss_reasons=True, max_num_seqs=4, num_blocks=FEW_BLOCKS[NAME])
    prompts = golden_prompts(NAME)
    for _ in range(2):
        results = engine.generate(prompts, SamplingParams(n=2, max_tokens=4))
    for first, other in zip(results[::2], results[1::2], strict=True):
        looked_up = [first.stats] if other.stats.num_shared_tokens else [first.stats, other.stats]
        for stats in looked_up:
            assert stats.num_missed_tokens is not None
            assert stats.num_cached_tokens is not None
            assert stats.num_shared_tokens == 0
            assert stats.num_cached_tokens + sum(stats.num_missed_tokens.values()) == stats.num_prompt_tokens
        if other.stats.num_shared_tokens:
            assert other.stats.num_missed_tokens is None
            assert other.stats.num_shared_tokens == other.stats.num_cached_tokens == other.stats.num_prompt_tokens - 1
    assert any(result.stats.num_shared_tokens for result in results)
    reasons = {reason for result in results for reason in result.stats.num_missed_tokens or ()}
    assert {MissReason.EVICTED, MissReason.LAST_TOKEN} <= reasons


@pytest.mark.parametrize("policy", ["slru", "cost"])
def test_every_eviction_policy_gives_the_same_tokens(policy: str) -> None:
    engine = make_engine(NAME, eviction_policy=policy, num_blocks=FEW_BLOCKS[NAME], max_num_batched_tokens=16)
    assert_greedy_is_golden(engine, NAME)
    assert type(engine.manager.block_pools[0].eviction_policy) is not LRUPolicy


@pytest.mark.parametrize("release", RELEASES)
def test_rules_of_every_release_give_the_same_tokens(release: str) -> None:
    engine = make_engine(NAME, release=release, num_blocks=FEW_BLOCKS[NAME], max_num_batched_tokens=16)
    assert_greedy_is_golden(engine, NAME)
    assert type(engine.manager.block_pools[0].eviction_policy) is LRUPolicy


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "at least one prompt token"),
        ([1, -2], None, "prompt_token_ids >= 0, got -2"),
        ([1.5], None, "expected integer prompt_token_ids, got float"),
        ([256], None, "expected token ids below 256, got 256"),
        ([[1, 2]], None, "prompt_token_ids"),
        ("text", None, "the model has no tokenizer"),
        ([1] * 130, SamplingParams(max_tokens=7), "at most 136 tokens .* got 130 \\+ 7"),
    ],
)
def test_bad_prompts_are_refused(prompt: object, params: SamplingParams | None, message: str) -> None:
    engine = make_engine(NAME)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], prompt], params)  # type: ignore[list-item]
    assert_no_leak(engine)


def test_a_pool_that_is_too_small_for_the_longest_request_is_named() -> None:
    with pytest.raises(MemoryBudgetError, match=r"needs \d+ blocks of pool 0 .*, got 4: \d+ blocks short"):
        LLMEngine(loaded(NAME), base_config(NAME, num_blocks=4))


def test_an_id_that_the_engine_makes_is_nobodys() -> None:
    """Callers may have taken those that come next; nobody who gave none is refused for it."""
    engine = make_engine(NAME)
    for name in ("request-1", "request-3.1", "request-3-1"):
        engine.add_request([1], request_id=name)
    assert engine.add_request([1], SamplingParams(n=2)) == "request-3-2"
    assert engine.add_request([1]) == "request-5"
    assert engine.num_unfinished == 6


def test_ids_in_use_and_busy_engines_are_refused() -> None:
    engine = make_engine(NAME)
    engine.add_request([1], request_id="a")
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request([1], request_id="a")
    with pytest.raises(ValueError, match="engine without requests, got 1 unfinished"):
        engine.generate([[1]])
    engine.abort("a")
    with pytest.raises(ValueError, match="one params or 2, got 1"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert_no_leak(engine)


def test_engines_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len of at most 512 .* got 1000"):
        LLMEngine(loaded(NAME), base_config(NAME, max_model_len=1000))
    with pytest.raises(ValueError, match="model, mesh and cache layout"):
        LLMEngine(loaded(NAME), base_config(NAME, num_blocks=50), like=make_engine(NAME))
    with pytest.raises(ValueError, match="max_num_batched_tokens of at least 65, got 64"):
        make_engine(NAME, max_num_batched_tokens=65)
    with pytest.raises(ValueError, match=r"compiler_options of .*xla_no_such_option.*, got None"):
        make_engine(NAME, compiler_options={"xla_no_such_option": 1})


def test_an_engine_compiles_its_steps_with_its_options() -> None:
    engine = LLMEngine(loaded(NAME), base_config(NAME, compiler_options={"xla_no_such_option": 1}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        engine.warmup()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size >= 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs >= 1, got 0"),
        ({"max_num_seqs": 65}, "max_num_batched_tokens >= max_num_seqs .* got 64 and 65"),
        ({"memory_bytes": 1}, "one of num_blocks and memory_bytes, got 600 and 1"),
        ({"num_blocks": None}, "got None and None"),
        ({"watermark": 1.0}, r"watermark in \[0, 1\), got 1.0"),
        ({"seed": -1}, "seed in"),
        ({"num_blocks": "600"}, "expected num_blocks as an integer, got '600'"),
        ({"max_num_seqs": "4"}, "expected max_num_seqs as an integer, got '4'"),
        ({"block_size": None}, "expected block_size as an integer, got None"),
        ({"max_buckets": 1.5}, "expected max_buckets as an integer, got 1.5"),
        ({"max_logprobs": True}, "expected max_logprobs as an integer, got True"),
        ({"compilation_cache": 1}, "expected compilation_cache as a folder, True or False, got 1"),
        ({"idle_state_dtype": "int4"}, "expected idle_state_dtype of int8, int16 or None, got 'int4'"),
        ({"release": "0.24.0"}, r"expected release of 0\.16\.0, .*, 0\.33\.0 or None, got '0\.24\.0'"),
        ({"eviction_policy": "fifo"}, "expected eviction_policy of probation, learned, lru, slru, cost, got 'fifo'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        base_config(NAME, **settings)


def test_a_memory_budget_sizes_the_pool() -> None:
    engine = LLMEngine(loaded(NAME), base_config(NAME, num_blocks=None, memory_bytes=1_000_000))
    assert isinstance(engine.config, EngineConfig)
    assert engine._runner.pages.num_bytes <= 1_000_000
    assert engine.plan.unused_bytes < engine.plan.pools[0].bytes_per_block
