"""The engine of every family under every flag of jax that an application may set."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvjax.engine import SamplingParams
from tests.flags import FLAGS, ROUNDS_ELSEWHERE
from tests.models.families import (
    ATOL,
    Family,
    RecordingEngine,
    engine_config,
    every_family,
    greedy_params,
    loaded,
    run_goldens,
)

DRAWN = SamplingParams(max_tokens=2, seed=3, top_p=0.9, top_k=20)


def first_steps(family: Family) -> tuple[list[list[int]], np.ndarray]:
    """Two greedy tokens after each golden prompt, and two that are drawn, and the logits that chose them."""
    engine = RecordingEngine(loaded(family), engine_config(family))
    results = [result for params in (greedy_params(2), DRAWN) for _, result in run_goldens(engine, family, params)]
    logits = np.concatenate([np.stack(engine.logits[result.request_id]) for result in results])
    return [result.output_token_ids.tolist() for result in results], logits


expected_steps = functools.cache(first_steps)


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("flag", FLAGS)
@every_family
def test_a_family_computes_the_same(family: Family, flag: str) -> None:
    """Tokens and logits, bit for bit where sums are rounded alike."""
    tokens, logits = expected_steps(family)
    with FLAGS[flag]():
        got = first_steps(family)
    assert got[0] == tokens
    assert got[1].dtype == logits.dtype
    np.testing.assert_allclose(got[1], logits, rtol=0, atol=ATOL if flag in ROUNDS_ELSEWHERE else 0)
