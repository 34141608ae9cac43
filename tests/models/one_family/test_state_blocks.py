"""States at any block: after a hit at every length a hybrid gives Hugging Face's tokens and logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.models.families import (
    IN_SLABS,
    Family,
    RecordingEngine,
    add_golden,
    assert_golden,
    assert_nothing_is_left,
    drain,
    engine_config,
    greedy_params,
    loaded,
    tokens_of_a_hit,
)
from tests.models.golden_models import goldens_of

QUICK = "qwen3_next"
RECURRENT = [family for family in IN_SLABS if family.name != "gemma4"]
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[] if family.name == QUICK else [pytest.mark.sweep])
        for family in RECURRENT
    ],
)


@families
def test_a_hit_at_every_length_goes_on_as_hugging_face_does(family: Family) -> None:
    """A request of the first tokens leaves a state where it ends, from which the whole prompt goes on."""
    settings = {"state_block_size": family.block_size}
    engine = RecordingEngine(loaded(family), engine_config(family, **settings))
    assert tokens_of_a_hit(engine) == family.block_size
    pages = engine._runner.pages
    engine._runner.pages = jax.tree.map(lambda memory: memory.at[1:].set(np.uint32(0xFFFFFFFF)), pages)
    golden = max(goldens_of(family.name), key=lambda golden: len(golden.prompt))
    for length in range(family.block_size, len(golden.prompt), family.block_size):
        engine.add_request(golden.prompt[:length], greedy_params(1))
        drain(engine)
        request_id = add_golden(engine, golden, greedy_params())
        result = drain(engine)[request_id]
        assert result.stats.num_cached_tokens == length
        assert_golden(engine, golden, result)
        engine.step()
        assert engine.manager.reset_prefix_cache()
    assert_nothing_is_left(engine)
