"""Greedy tokens are Hugging Face's, whatever the cache and the scheduler do.

Of a model with windows and of the demo; tests/models/test_families.py has every family. The goldens' two best logits
differ by more than 1e-3 at every step, so a correct float32 engine has no choice.
"""

from __future__ import annotations

import itertools

import pytest

from kvjax.engine import GenerationResult, SamplingParams
from tests.engine.engines import (
    FEW_BLOCKS,
    NUM_GREEDY_TOKENS,
    assert_greedy_is_golden,
    assert_no_leak,
    make_engine,
)
from tests.models.golden_models import goldens_of

pytestmark = pytest.mark.parametrize("name", ["gemma3", "demo"])


def test_goldens_leave_no_choice(name: str) -> None:
    assert min(golden.least_gap for golden in goldens_of(name)) > 1e-3


def test_prefix_hits_change_nothing(name: str) -> None:
    engine = make_engine(name)
    first = assert_greedy_is_golden(engine, name)
    second = assert_greedy_is_golden(engine, name)
    for before, after in zip(first, second, strict=True):
        assert after.stats.num_cached_tokens == (before.stats.num_prompt_tokens - 1) // 8 * 8
        assert after.stats.num_computed_tokens < before.stats.num_computed_tokens or before.stats.num_cached_tokens


def test_without_prefix_caching(name: str) -> None:
    results = assert_greedy_is_golden(make_engine(name, enable_prefix_caching=False), name)
    assert all(result.stats.num_cached_tokens == 0 for result in results)


@pytest.mark.parametrize("max_num_batched_tokens", [8, 13, 32, 64])
def test_every_budget_of_chunked_prefill(name: str, max_num_batched_tokens: int) -> None:
    engine = make_engine(name, max_num_batched_tokens=max_num_batched_tokens)
    assert_greedy_is_golden(engine, name)
    assert max(step.num_new_tokens for step in engine.step_stats) <= max_num_batched_tokens


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_every_batch_size_and_order(name: str, max_num_seqs: int) -> None:
    order = list(range(len(goldens_of(name))))
    order = order[max_num_seqs % len(order) :][::-1] + order[: max_num_seqs % len(order)]
    engine = make_engine(name, max_num_seqs=max_num_seqs)
    assert_greedy_is_golden(engine, name, order)
    assert max(step.num_requests for step in engine.step_stats) <= max_num_seqs


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_pool_of_a_few_blocks(name: str, enable_prefix_caching: bool, async_scheduling: bool) -> None:
    engine = make_engine(
        name,
        num_blocks=FEW_BLOCKS[name],
        max_num_batched_tokens=16,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    results = assert_greedy_is_golden(engine, name)
    if enable_prefix_caching:  # without it, hybrid models run one request at a time here
        assert sum(result.stats.num_preemptions for result in results) > 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemption_at_any_time(name: str, enable_prefix_caching: bool, async_scheduling: bool) -> None:
    """Every third step the last running request loses all it has."""
    engine = make_engine(name, enable_prefix_caching=enable_prefix_caching, async_scheduling=async_scheduling)
    goldens = goldens_of(name)
    for golden in goldens:
        engine.add_request(golden.prompt, SamplingParams(max_tokens=NUM_GREEDY_TOKENS, temperature=0.0))
    results: list[GenerationResult] = []
    for step in itertools.count():
        if step % 3 == 2 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt_last()
        results += [output.result for output in engine.step() if output.result is not None]
        engine.check_invariants()
        if len(results) == len(goldens):
            break
    tokens = {result.request_id: result.output_token_ids.tolist() for result in results}
    assert tokens == {f"request-{i}": golden.greedy.tolist() for i, golden in enumerate(goldens)}
    assert sum(result.stats.num_preemptions for result in results) > len(goldens)
    engine.step()
    assert_no_leak(engine)


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_asynchronous_steps(name: str, max_num_batched_tokens: int) -> None:
    engine = make_engine(name, async_scheduling=True, max_num_batched_tokens=max_num_batched_tokens)
    assert_greedy_is_golden(engine, name)
    assert_greedy_is_golden(engine, name)
