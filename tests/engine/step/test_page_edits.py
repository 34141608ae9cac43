"""Page copies and zeroing on the device: greedy tokens stay Hugging Face's, samples those of requests alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import EngineConfig, SamplingParams
from tests.engine.engines import (
    FEW_BLOCKS,
    NUM_GREEDY_TOKENS,
    assert_greedy_is_golden,
    assert_no_leak,
    golden_prompts,
    make_engine,
)
from tests.models.golden_models import GOLDEN_MODELS, goldens_of

SWEPT = set(GOLDEN_MODELS) - {"gemma3", "demo"}
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] if name in SWEPT else []) for name in GOLDEN_MODELS]
)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"enable_prefix_caching": False}, {"few": True}])
@every_model
def test_greedy_samples_of_a_prompt_are_all_golden(name: str, settings: dict[str, bool]) -> None:
    if settings == {"few": True}:
        engine = make_engine(name, num_blocks=FEW_BLOCKS[name], max_num_batched_tokens=16)
    else:
        engine = make_engine(name, **settings)
    results = engine.generate(golden_prompts(name), SamplingParams(n=3, max_tokens=NUM_GREEDY_TOKENS, temperature=0.0))
    for i, golden in enumerate(goldens_of(name)):
        for result in results[3 * i : 3 * i + 3]:
            np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
            assert result.prompt_token_ids.size == golden.prompt.size
    assert_no_leak(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_samples_are_those_of_requests_alone(max_num_seqs: int, async_scheduling: bool) -> None:
    prompt, params = golden_prompts("llama")[1], {"max_tokens": 12, "temperature": 1.5}
    expected = make_engine("llama").generate([prompt] * 4, [SamplingParams(seed=7 + i, **params) for i in range(4)])
    engine = make_engine("llama", max_num_seqs=max_num_seqs, async_scheduling=async_scheduling)
    samples = engine.generate([prompt], SamplingParams(n=4, seed=7, **params))
    assert [one.output_token_ids.tolist() for one in samples] == [one.output_token_ids.tolist() for one in expected]
    assert [one.request_id for one in samples] == ["request-0", "request-0.1", "request-0.2", "request-0.3"]
    assert len({tuple(one.output_token_ids.tolist()) for one in samples}) == 4
    assert samples[1].stats.num_cached_tokens == prompt.size - 1
    assert engine.generate([prompt], SamplingParams(seed=7, **params))[0].request_id == "request-4"


def test_samples_without_a_seed_differ() -> None:
    engine = make_engine("llama")
    samples = engine.generate([golden_prompts("llama")[0]], SamplingParams(n=3, max_tokens=12, temperature=2.0))
    assert len({tuple(one.output_token_ids.tolist()) for one in samples}) == 3


def test_an_id_of_a_sample_is_taken() -> None:
    engine = make_engine("llama")
    engine.add_request([1, 2], request_id="a.2")
    with pytest.raises(ValueError, match=r"request id 'a\.2' is in use"):
        engine.add_request([1, 2, 3], SamplingParams(n=3), request_id="a")
    assert engine.num_unfinished == 1
    with pytest.raises(ValueError, match="expected n >= 1, got 0"):
        SamplingParams(n=0)


@pytest.mark.parametrize("async_scheduling", [False, True])
@every_model
def test_hits_inside_blocks_change_nothing(name: str, async_scheduling: bool) -> None:
    """Each prompt but for its last tokens is cached with a continuation of its own before."""
    engine = make_engine(name, sub_block_hits=True, async_scheduling=async_scheduling)
    goldens = goldens_of(name)
    lengths = [max(golden.prompt.size - 3 - i, 1) for i, golden in enumerate(goldens)]
    others = [(int(golden.prompt[k]) + 1) % 200 for golden, k in zip(goldens, lengths, strict=True)]
    prompts = [np.concatenate([g.prompt[:k], [x] * 9]) for g, k, x in zip(goldens, lengths, others, strict=True)]
    engine.generate(prompts, SamplingParams(max_tokens=1))
    results = assert_greedy_is_golden(engine, name)
    assert all(result.stats.num_cached_tokens >= k // 8 * 8 for result, k in zip(results, lengths, strict=True))
    assert sum(result.stats.num_cached_tokens % 8 > 0 for result in results) > len(results) // 2


@every_model
def test_pages_are_zero_before_they_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page but the null page is NaN at first; afterwards those that were dealt are not, in no slot."""
    engine = make_engine(name, zero_new_pages=True)
    engine._runner.pages = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan).at[0].set(0.0), engine._runner.pages)
    dealt: list[set[int]] = [{0} for _ in engine.manager.block_pools]
    take = engine.manager.take_pages_to_zero

    def take_and_note() -> tuple[np.ndarray, ...]:
        taken = take()
        for ids, of_pool in zip(taken, dealt, strict=True):
            of_pool |= set(ids.tolist())
        return taken

    monkeypatch.setattr(engine.manager, "take_pages_to_zero", take_and_note)
    assert_greedy_is_golden(engine, name)
    for ids, columns in zip(dealt, engine._runner.pages.pools, strict=True):
        assert len(ids) > 5
        for array in jax.tree.leaves(columns):
            is_finite = np.isfinite(np.asarray(array)).reshape(len(array), -1)
            assert np.flatnonzero(is_finite.all(axis=1)).tolist() == sorted(ids)


def test_hits_inside_blocks_need_prefix_caching() -> None:
    with pytest.raises(ValueError, match="expected enable_prefix_caching=True with sub_block_hits=True, got False"):
        EngineConfig(num_blocks=9, sub_block_hits=True, enable_prefix_caching=False)
