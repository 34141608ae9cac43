"""The engine of every family, and of the demo, under every flag of jax that an application may set."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvjax.demo import demo_model_path
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
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

every_flag = pytest.mark.parametrize("flag", FLAGS)


def first_steps(family: Family) -> tuple[list[list[int]], np.ndarray]:
    """Two tokens after each golden prompt, and the logits that chose them."""
    engine = RecordingEngine(loaded(family), engine_config(family))
    results = [result for _, result in run_goldens(engine, family, greedy_params(2))]
    logits = np.concatenate([np.stack(engine.logits[result.request_id]) for result in results])
    return [result.output_token_ids.tolist() for result in results], logits


expected_steps = functools.cache(first_steps)


@pytest.mark.timeout(1_200)
@every_flag
@every_family
def test_a_family_computes_the_same(family: Family, flag: str) -> None:
    """Tokens and logits, bit for bit where sums are rounded alike."""
    tokens, logits = expected_steps(family)
    with FLAGS[flag]():
        got = first_steps(family)
    assert got[0] == tokens
    assert got[1].dtype == logits.dtype
    np.testing.assert_allclose(got[1], logits, rtol=0, atol=ATOL if flag in ROUNDS_ELSEWHERE else 0)


def demo_text() -> list[str]:
    config = EngineConfig(num_blocks=100, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, max_buckets=1)
    params = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, seed=3, top_p=0.9, top_k=20)]
    results = LLMEngine.from_folder(demo_model_path(), config).generate(
        ["The try statement", "The try statement specifies"], params
    )
    return [result.text for result in results]


expected_text = functools.cache(demo_text)


@pytest.mark.timeout(1_200)
@every_flag
def test_the_demo_writes_the_same(flag: str) -> None:
    """Greedy and drawn tokens."""
    expected = expected_text()
    with FLAGS[flag]():
        assert demo_text() == expected
