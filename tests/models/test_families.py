"""Laws that every family of models keeps, whatever attention it has: Hugging Face's logits and tokens, in every mode.

The goldens' two best logits differ by more than 1e-3 at every step, so a correct float32 engine has no choice.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvjax.device.programs.compile_counter import count_compilations
from kvjax.engine import SamplingParams
from tests.models.families import (
    ATOL,
    NUM_GREEDY_TOKENS,
    Family,
    add_golden,
    assert_golden,
    assert_nothing_is_left,
    drain,
    every_family,
    every_family_but_variants,
    greedy_params,
    make_engine,
    run_goldens,
    run_preempted,
    tokens_of_a_hit,
)
from tests.models.golden_models import goldens_of


@every_family
def test_prefill_and_decoding_are_hugging_faces(family: Family) -> None:
    """One request a step and its prompt in as few chunks as the step allows."""
    engine = make_engine(family, enable_prefix_caching=False, max_num_seqs=1)
    for golden, result in run_goldens(engine, family):
        assert_golden(engine, golden, result)
    assert_nothing_is_left(engine)


@every_family
def test_logits_of_prompt_tokens_are_hugging_faces(family: Family) -> None:
    """Every beginning of a prompt is a prompt, whose last token's logits were kept."""
    engine = make_engine(family, enable_prefix_caching=False)
    golden = goldens_of(family.name)[3]
    for position, logits in zip(golden.positions, golden.logits, strict=True):
        beginning = dataclasses.replace(golden, prompt=golden.prompt[: position + 1])
        request_id = add_golden(engine, beginning, greedy_params(1))
        drain(engine)
        np.testing.assert_allclose(engine.logits[request_id][0], logits, atol=ATOL, rtol=0, err_msg=str(position))


@every_family_but_variants
@pytest.mark.parametrize("max_num_batched_tokens", [pytest.param(8, marks=pytest.mark.sweep), 13])
def test_chunks_that_split_blocks_and_windows(family: Family, max_num_batched_tokens: int) -> None:
    engine = make_engine(family, enable_prefix_caching=False, max_num_batched_tokens=max_num_batched_tokens)
    for golden, result in run_goldens(engine, family):
        assert_golden(engine, golden, result)
    assert_nothing_is_left(engine)


@every_family_but_variants
@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_prefix_hits_change_nothing(family: Family, async_scheduling: bool) -> None:
    """Prompts with a common beginning, then all again, then prompts that go on where earlier answers were."""
    engine = make_engine(family, async_scheduling=async_scheduling)
    first = run_goldens(engine, family)
    again = run_goldens(engine, family)
    for golden, result in (*first, *again):
        assert_golden(engine, golden, result)
    least = tokens_of_a_hit(engine)
    assert all((result.stats.num_cached_tokens > 0) == (len(golden.prompt) > least) for golden, result in again)
    for golden in goldens_of(family.name):
        half = NUM_GREEDY_TOKENS // 2
        longer = dataclasses.replace(
            golden,
            prompt=np.concatenate([golden.prompt, golden.greedy[:half]]),
            greedy=golden.greedy[half:],
            decode_logits=golden.decode_logits[half:],
        )
        request_id = add_golden(engine, longer, greedy_params(half))
        result = drain(engine)[request_id]
        assert_golden(engine, longer, result)
        # of an answer a recurrent state is kept behind 64 tokens and more: these prompts hit the first one's alone
        known = golden if engine.manager.groups.state_steps else longer
        assert (result.stats.num_cached_tokens > 0) == (len(known.prompt) > least)
    assert_nothing_is_left(engine)


@every_family_but_variants
@pytest.mark.parametrize(
    ("enable_prefix_caching", "async_scheduling"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.sweep),
        pytest.param(False, True, marks=pytest.mark.sweep),
        pytest.param(False, False, marks=pytest.mark.sweep),
    ],
)
def test_preemption_at_any_time(family: Family, enable_prefix_caching: bool, async_scheduling: bool) -> None:
    """Every third step the last running request loses all it has."""
    engine = make_engine(family, enable_prefix_caching=enable_prefix_caching, async_scheduling=async_scheduling)
    results = run_preempted(engine, family)
    for golden, result in results:
        np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
    assert sum(result.stats.num_preemptions for _, result in results) > len(results)
    engine.step()
    assert_nothing_is_left(engine)


@every_family_but_variants
def test_eight_samples_by_fork_are_eight_requests(family: Family) -> None:
    golden = goldens_of(family.name)[1]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=8)
    forking, separate = make_engine(family), make_engine(family, enable_prefix_caching=False)
    add_golden(forking, golden, params, request_id="sample")
    forked = drain(forking)
    for place in range(8):
        one = dataclasses.replace(params, n=1, seed=5 + place)
        add_golden(separate, golden, one, request_id=f"{place}")
    alone = drain(separate)
    assert len({result.output_token_ids.tobytes() for result in alone.values()}) > 1
    for place in range(8):
        name = "sample" if place == 0 else f"sample.{place}"
        np.testing.assert_array_equal(forked[name].output_token_ids, alone[f"{place}"].output_token_ids)
        np.testing.assert_allclose(forking.logits[name], separate.logits[f"{place}"], atol=ATOL, rtol=0)
    assert_nothing_is_left(forking)


@every_family_but_variants
def test_no_step_holds_more_blocks_than_the_formula(family: Family) -> None:
    """One long generation: windows and chunks release what is behind them, recurrent layers keep their states only."""
    engine = make_engine(family, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=8)
    golden = goldens_of(family.name)[2]
    add_golden(engine, golden, greedy_params(family.max_model_len - len(golden.prompt)))
    limits = [
        group.kv_cache_spec.max_blocks_per_request(family.max_model_len, engine.config.max_in_flight_tokens)
        for group in engine.plan.config.kv_cache_groups
    ]
    most = [0] * len(limits)
    while engine.num_unfinished:
        engine.step()
        for request in engine.scheduler.running:
            for group_id, table in enumerate(engine.manager.get_block_ids(request.request_id)):
                most[group_id] = max(most[group_id], sum(block != 0 for block in table))
    assert all(0 < held <= limit for held, limit in zip(most, limits, strict=True)), (most, limits)


@every_family_but_variants
def test_a_long_mixed_run_compiles_nothing(family: Family) -> None:
    """Requests of all lengths, greedy and random, alone and in samples, after warm-up."""
    num_requests = 200 if family.name == "gemma3" else 60
    engine = make_engine(family)
    engine.warmup()
    random = np.random.default_rng(0)
    goldens = goldens_of(family.name)
    num_results = 0
    with count_compilations() as count:
        for number in range(num_requests):
            golden = goldens[random.integers(len(goldens))]
            prompt = golden.prompt if golden.extras else golden.prompt[: random.integers(1, len(golden.prompt) + 1)]
            params = SamplingParams(
                max_tokens=int(random.integers(1, 6)),
                temperature=float(number % 3 == 0),
                n=2 if number % 20 == 0 else 1,
            )
            add_golden(engine, dataclasses.replace(golden, prompt=prompt), params)
            if number % 7 == 0:
                num_results += len(engine.step().results)
        num_results += len(drain(engine))
    assert count.num_programs == 0
    assert num_results == num_requests + num_requests // 20
    assert_nothing_is_left(engine)
