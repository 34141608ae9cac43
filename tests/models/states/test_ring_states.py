"""Recurrent states with rings: which models and settings have them, and that they write few states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.engine import EngineConfig, LLMEngine, SpeculativeConfig
from kvjax.engine.front import llm_engine
from tests.models.families import IN_RINGS, Family, assert_nothing_is_left, engine_config, loaded
from tests.models.golden_models import goldens_of
from tests.models.speculating import NUM_DRAFTS, WrongDrafts
from tests.models.states.test_state_blocks import without_numbers
from tests.models.test_families_speculation import assert_greedy, run_all

KIMI = next(family for family in IN_RINGS if family.name == "kimi_linear")
SETTINGS: dict[str, Any] = {"num_blocks": 100, "max_model_len": 128, "block_size": 8}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ring_tokens": 0}, r"expected ring_tokens > 0 \(num_drafts\) or None, got 0"),
        (
            {"ring_tokens": 3, "speculative": SpeculativeConfig(num_drafts=3)},
            r"expected ring_tokens > 3 \(num_drafts\) or None, got 3",
        ),
        ({"ring_tokens": 8, "idle_state_dtype": "int8"}, "expected one_memory off and idle_state_dtype=None"),
        ({"ring_tokens": 8, "one_memory": True}, "expected one_memory off and idle_state_dtype=None"),
    ],
)
def test_settings_that_rings_do_not_go_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**SETTINGS, **settings)


def test_models_without_rings() -> None:
    config = EngineConfig(**SETTINGS, ring_tokens=8)
    with pytest.raises(ValueError, match="expected recurrent layers with ring_tokens, got none"):
        LLMEngine(loaded(Family("llama")), config)
    with pytest.raises(NotImplementedError, match="expected a layer that says what a token adds to its state"):
        LLMEngine(loaded(Family("jamba")), config)


def drafting_engine(seed: int, **settings: Any) -> LLMEngine:
    """An engine of its own whose drafts are `WrongDrafts`; all its pages but the null ones are NaN."""
    answers = {golden.prompt.tobytes(): golden.greedy for golden in goldens_of(KIMI.name)}
    config = engine_config(KIMI, speculative=SpeculativeConfig(num_drafts=NUM_DRAFTS), **settings)
    with mock.patch.object(llm_engine, "PromptLookup", lambda table, *_: WrongDrafts(table, answers, seed)):
        engine = LLMEngine(loaded(KIMI), config)
    engine._runner.pages = without_numbers(engine._runner.pages)
    return engine


def test_drafts_have_no_states_and_change_no_token() -> None:
    """Hits, preemption and states on the way between; states every block, kept every 64 tokens of an answer."""
    engine = drafting_engine(0, state_block_size=KIMI.block_size)
    specs = {group.kv_cache_spec for group in engine.plan.config.kv_cache_groups}
    [spec] = [spec for spec in specs if isinstance(spec, RingStateSpec)]
    assert spec.block_size == KIMI.block_size
    assert spec.max_blocks_per_request(KIMI.max_model_len, 64) == 2
    assert engine.manager.groups.checkpoints_in_step
    for preempt_every in (0, 5):
        pairs = run_all(engine, KIMI, preempt_every)
        assert_greedy(pairs)
        assert sum(result.stats.num_accepted_tokens for _, result in pairs) > 0
        rejected = sum(result.stats.num_draft_tokens - result.stats.num_accepted_tokens for _, result in pairs)
        assert rejected > 0
    assert all(result.stats.num_cached_tokens for _, result in pairs)
    assert_nothing_is_left(engine)
