"""Speculation changes no token of any family, whatever drafts, and leaves nothing behind.

Tokens are compared with Hugging Face's. Drafts that are right up to a random place, and wrong there, bring every number
of rejected tokens in every kind of layer: windows, chunks, latents, compressed entries, recurrent states, encoders.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvjax.engine import GenerationResult, LLMEngine
from tests.models.families import (
    FAMILIES,
    IN_RINGS,
    IN_SLABS,
    Family,
    add_golden,
    assert_nothing_is_left,
    every_family_but_variants,
    greedy_params,
    tokens_of_a_hit,
)
from tests.models.golden_models import Golden, goldens_of
from tests.models.speculating import ITSELF, NUM_DRAFTS, RANDOM, WrongDrafts, speculating_engine, wrong_engine

# Targets of prompt lookup and draft models outside sweeps: one of each kind of layer.
DRAFTED_FAMILIES = ("gemma3", "llama4", "deepseek_v32", "kimi_linear", "whisper")
# And of wrong drafts: tests/device/steps/test_drafts.py has the other kinds of recurrent states and entries.
WRONG_DRAFTED_FAMILIES = ("gemma3", "deepseek_v4", "kimi_linear", "whisper")
# Models that cannot draft: recurrent states do not go back, and drafts see no encoder and no vectors.
OTHER_FAMILIES = (
    "jamba",
    "granite_moe_hybrid",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "lfm3_odd",
    "mamba2",
    "mamba2_odd",
    "falcon_h1",
    "falcon_h1_odd",
    "olmo_hybrid",
    "olmo_hybrid_odd",
    "whisper",
    "qwen3_vl",
    "qwen2_5_vl",
    "qwen2_5_vl_odd",
)


def outside_sweeps(names: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every family, those of `names` without `-m sweep`."""
    params = [
        pytest.param(family, id=family.id, marks=[] if family.id in names else [pytest.mark.sweep])
        for family in (*FAMILIES, *IN_SLABS, *IN_RINGS)
    ]
    return pytest.mark.parametrize("family", params, scope="module")


def run_all(engine: LLMEngine, family: Family, preempt_every: int = 0) -> list[tuple[Golden, GenerationResult]]:
    """All prompts of the family, queued at once; every so many steps the last running request loses all it has."""
    return run(engine, goldens_of(family.name), preempt_every)


def run(engine: LLMEngine, prompts: list[Golden], preempt_every: int = 0) -> list[tuple[Golden, GenerationResult]]:
    """Likewise, of some prompts."""
    goldens = {add_golden(engine, golden, greedy_params()): golden for golden in prompts}
    results: dict[str, GenerationResult] = {}
    for step in itertools.count(1):
        if preempt_every and step % preempt_every == 0 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt_last()
        results |= {result.request_id: result for result in engine.step().results.values()}
        if step % 16 == 0:
            engine.check_invariants()
        if not engine.num_unfinished and not engine._runner.num_in_flight:
            break
    return [(golden, results[request_id]) for request_id, golden in goldens.items()]


def assert_greedy(pairs: list[tuple[Golden, GenerationResult]]) -> None:
    for golden, result in pairs:
        np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
        assert len(result.logprobs) == len(golden.greedy)


@outside_sweeps(WRONG_DRAFTED_FAMILIES)
def test_drafts_that_turn_wrong_change_no_token(family: Family) -> None:
    engine = wrong_engine(family, seed=0)
    assert_greedy(run_all(engine, family))
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, WrongDrafts)
    assert {(drafts, accepted) for drafts in range(1, NUM_DRAFTS + 1) for accepted in range(drafts + 1)} == set(
        drafter.num_settled
    )
    assert_nothing_is_left(engine)


@outside_sweeps(DRAFTED_FAMILIES)
def test_prompt_lookup_with_hits_and_preemption_changes_no_token(family: Family) -> None:
    """Asynchronous steps, all prompts twice: the second time their beginnings are found."""
    engine = speculating_engine(family, async_scheduling=True)
    assert_greedy(run_all(engine, family))
    again = run_all(engine, family, preempt_every=3)
    assert_greedy(again)
    least = tokens_of_a_hit(engine)
    assert all(result.stats.num_cached_tokens for golden, result in again if len(golden.prompt) > least)
    assert_nothing_is_left(engine)


@pytest.mark.sweep
@every_family_but_variants
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("preempt_every", [0, 3])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_wrong_drafts_in_every_mode(
    family: Family, seed: int, async_scheduling: bool, preempt_every: int, enable_prefix_caching: bool
) -> None:
    settings = {"async_scheduling": async_scheduling, "enable_prefix_caching": enable_prefix_caching}
    engine = wrong_engine(family, seed, **settings)
    for _ in range(2):
        assert_greedy(run_all(engine, family, preempt_every))
    assert_nothing_is_left(engine)


@outside_sweeps(DRAFTED_FAMILIES)
@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_draft_model_of_random_weights_changes_no_token(family: Family, async_scheduling: bool) -> None:
    """It is mostly wrong; its requests come and go with the target's, preempted ones too."""
    engine = speculating_engine(family, RANDOM, async_scheduling=async_scheduling)
    assert_greedy(run_all(engine, family))
    pairs = run_all(engine, family, preempt_every=4)
    assert_greedy(pairs)
    assert sum(result.stats.num_draft_tokens for _, result in pairs) > 20 * len(pairs)
    assert_nothing_is_left(engine)
    assert_no_draft_is_left(engine)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[] if family.name == "gemma3" else [pytest.mark.sweep])
        for family in FAMILIES
        if family.name not in OTHER_FAMILIES
    ],
    scope="module",
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_model_accepts_what_it_drafts_for_itself(family: Family, async_scheduling: bool) -> None:
    """All of it: an answer takes the step of its prompt, one without drafts, and others with a token for four.

    So it is of a prompt alone. Beside others drafts begin when the draft model has read all prompts.
    """
    engine = speculating_engine(family, ITSELF, async_scheduling=async_scheduling)
    goldens = goldens_of(family.name)
    together, alone = run(engine, goldens), run(engine, goldens[:1])
    assert_greedy(together + alone)
    for golden, result in together + alone:
        assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens > len(golden.greedy) // 3
    assert alone[0][1].stats.num_draft_tokens > len(goldens[0].greedy) // 2
    assert_nothing_is_left(engine)
    assert_no_draft_is_left(engine)


def assert_no_draft_is_left(engine: LLMEngine) -> None:
    assert engine._draft_model is not None
    assert engine._draft_model.manager.usage == 0
    assert engine._draft_model.requests.num_followed == 0
