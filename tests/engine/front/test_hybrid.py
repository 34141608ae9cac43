"""Without hybrid management a model with windows generates the same tokens from one table of more pages."""

from __future__ import annotations

from kvjax.engine import LLMEngine
from tests.engine.engines import assert_greedy_is_golden, base_config, loaded, make_engine


def pages_in_use(engine: LLMEngine) -> int:
    """Most pages of all layers that requests held at the end of any step of the engine's run."""
    return max(step.pools[0].held for step in engine.step_stats) * len(engine.plan.config.pools[0].columns)


def test_promoted_windows_keep_their_masks() -> None:
    hybrid = make_engine("gemma3")
    alone = LLMEngine(loaded("gemma3"), base_config("gemma3", hybrid=False))
    assert len(hybrid.plan.groups) > len(alone.plan.groups) == 1
    for engine in (hybrid, alone):
        assert_greedy_is_golden(engine, "gemma3")
    assert pages_in_use(alone) > pages_in_use(hybrid)
