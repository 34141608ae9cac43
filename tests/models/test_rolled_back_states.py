"""Recurrent states after rejected drafts are those of an engine that never drafted.

States are read from the pages that the next step starts from, as its plan finds them.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.engine import LLMEngine
from tests.models.families import FAMILIES, Family, add_golden, greedy_params, make_engine
from tests.models.golden_models import goldens_of
from tests.models.speculating import WrongDrafts, wrong_engine

RECURRENT = ("jamba", "granite_moe_hybrid", "nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear")
SWEPT = ("granite_moe_hybrid", "nemotron_h", "qwen3_5")  # have the layers of others

States = dict[str, list[np.ndarray]]  # by layer


def states_of(engine: LLMEngine, row: int) -> States:
    """What the next step of the request in `row` starts from."""
    computed = engine.manager.request_table.num_computed_tokens[[row]]
    states: States = {}
    for group_id, group in enumerate(engine.plan.config.kv_cache_groups):
        pages = group.kv_cache_spec.state_pages
        if pages is None:
            continue
        tables, counts = engine.manager.block_tables(group_id), engine.manager.num_blocks(group_id)
        page = pages.pages_of_states(tables, counts, np.array([row]), computed).item()
        for place, name in enumerate(group.layer_names):
            arrays = engine._runner.pages.column(group.pool_id, place)
            states[name] = [np.asarray(array[page]) for array in arrays]
    return states


def states_by_length(engine: LLMEngine, family: Family) -> dict[int, States]:
    """After each step of one request that decodes, by its computed tokens."""
    golden = goldens_of(family.name)[1]
    add_golden(engine, golden, greedy_params(), request_id="a")
    seen: dict[int, States] = {}
    while engine.num_unfinished:
        engine.step()
        for request in engine.scheduler.running:
            if request.request.num_output_tokens:
                seen[request.request.num_computed_tokens] = states_of(engine, request.request.row)
    return seen


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[pytest.mark.sweep] if family.name in SWEPT else [])
        for family in FAMILIES
        if family.name in RECURRENT
    ],
)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_states_after_rejections_are_those_never_drafted(family: Family, enable_prefix_caching: bool) -> None:
    never = states_by_length(make_engine(family, enable_prefix_caching=enable_prefix_caching), family)
    num_rejected = 0
    for seed in range(4):
        engine = wrong_engine(family, seed, enable_prefix_caching=enable_prefix_caching)
        drafted = states_by_length(engine, family)
        drafter = engine.scheduler.drafter
        assert isinstance(drafter, WrongDrafts)
        num_rejected += sum((drafts - right) * count for (drafts, right), count in drafter.num_settled.items())
        assert len(drafted) < len(never)
        for length, states in drafted.items():
            for name, arrays in states.items():
                for array, expected in zip(arrays, never[length][name], strict=True):
                    scale = max(1.0, float(np.abs(expected).max()))
                    np.testing.assert_allclose(array, expected, atol=1e-5 * scale, err_msg=f"{length} tokens, {name}")
    assert num_rejected > 20
