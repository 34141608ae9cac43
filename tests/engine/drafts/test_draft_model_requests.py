"""An engine with a draft model while requests fork, are aborted or broken off: the same tokens, and nothing left."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.device.programs.compile_counter import count_compilations
from kvjax.engine import LLMEngine, SamplingParams
from tests.models.families import Family, assert_nothing_is_left, drain, greedy_params
from tests.models.golden_models import goldens_of
from tests.models.speculating import ITSELF, speculating_engine

LLAMA = Family("llama")


def assert_no_draft_is_left(engine: LLMEngine) -> None:
    assert_nothing_is_left(engine)
    assert engine._draft_model is not None
    assert engine._draft_model.manager.usage == 0
    assert engine._draft_model.requests.num_followed == 0


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_samples_of_a_prompt_are_those_without_drafts(enable_prefix_caching: bool) -> None:
    """Each follows its own sample; with a prefix cache they share the draft model's blocks of the prompt."""
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=3, n=6)
    prompt = goldens_of("llama")[1].prompt
    outputs = []
    for drafts in (ITSELF, None):
        engine = speculating_engine(LLAMA, drafts, enable_prefix_caching=enable_prefix_caching)
        engine.add_request(prompt, params, request_id="a")
        results = drain(engine)
        outputs.append([results[name].output_token_ids.tolist() for name in sorted(results)])
        if drafts is not None:
            assert sum(result.stats.num_accepted_tokens for result in results.values()) > 30
            assert_no_draft_is_left(engine)
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) > 1


def test_an_aborted_request_leaves_no_draft_behind() -> None:
    engine = speculating_engine(LLAMA, ITSELF, async_scheduling=True)
    goldens = goldens_of("llama")[:3]
    names = [engine.add_request(golden.prompt, greedy_params()) for golden in goldens]
    for _ in range(6):
        engine.step()
    assert engine._draft_model is not None
    assert engine._draft_model.requests.num_followed == 3
    engine.abort(names[1])
    assert engine._draft_model.requests.num_followed == 2
    engine.check_invariants()
    results = drain(engine)
    for name, golden in zip(names, goldens, strict=True):
        if name != names[1]:
            np.testing.assert_array_equal(results[name].output_token_ids, golden.greedy)
    assert_no_draft_is_left(engine)


def test_nothing_compiles_after_warm_up() -> None:
    engine = speculating_engine(LLAMA, ITSELF)
    engine.warmup()
    with count_compilations() as count:
        for golden in goldens_of("llama"):
            engine.add_request(golden.prompt, SamplingParams(max_tokens=9, temperature=float(len(golden.prompt) % 2)))
        results = drain(engine)
    assert sum(result.stats.num_accepted_tokens for result in results.values()) > 10
    assert count.num_programs == 0
