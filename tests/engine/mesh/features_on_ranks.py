"""Run by tests in a process of its own: what an engine over two data ranks gives is what one device gives.

    python -m tests.engine.mesh.features_on_ranks FEATURE ...

Each feature is a function here. Pools hold few requests, so that some are preempted.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams, SpeculativeConfig
from kvjax.engine.step.rank_loops import RankLoops
from kvjax.errors import EngineClosedError
from kvjax.metrics import EngineMetrics
from kvjax.models import LoadedModel, load_model
from kvjax.tiers.config import TierConfig
from tests.metrics.test_manager_metrics import value
from tests.models.golden_models import goldens_of, model_folder

NAME = "llama"
NUM_RANKS = 2
ATOL = 2e-4  # of log-probabilities
BASE = EngineConfig(
    block_size=8,
    num_blocks=24,
    max_model_len=136,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_buckets=1,
    max_logprobs=3,
    watermark=0.0,
)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PARAMS = (
    SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.8, seed=1, repetition_penalty=1.3, logprobs=1),
    SamplingParams(max_tokens=12, temperature=0.9, seed=2, presence_penalty=0.7, frequency_penalty=0.4, top_p=0.9),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3, top_k=5, min_p=0.1, logit_bias={7: 3.0}, bad_token_ids=(3,)),
    SamplingParams(max_tokens=9, temperature=1.0, seed=4, min_tokens=3, n=2),
    SamplingParams(max_tokens=6, temperature=0.7, seed=5, allowed_token_ids=tuple(range(40)), prompt_logprobs=0),
)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((NUM_RANKS,), ("data",))


@functools.cache
def model_on(num_ranks: int) -> LoadedModel:
    return load_model(model_folder(NAME), "float32", mesh() if num_ranks > 1 else None)


@functools.cache
def compiled(num_ranks: int, num_drafts: int) -> LLMEngine:
    speculative = SpeculativeConfig(num_drafts=num_drafts) if num_drafts else None
    config = replace(BASE, speculative=speculative)
    return LLMEngine(model_on(num_ranks), config, mesh=mesh() if num_ranks > 1 else None)


def engine_of(num_ranks: int, **settings: Any) -> LLMEngine:
    config = replace(BASE, **settings)
    like = compiled(num_ranks, config.num_drafts)
    return LLMEngine(like.model, config, mesh=mesh() if num_ranks > 1 else None, like=like)


def prompts() -> list[list[int]]:
    """The goldens' prompts; then prompts that repeat themselves, which lookup drafts from."""
    own = [golden.prompt.tolist() for golden in goldens_of(NAME)]
    return [*own, *([*prompt[:6]] * 4 for prompt in own)]


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    every = prompts() * 2
    return every, [PARAMS[i % len(PARAMS)] for i in range(len(every))]


def assert_equal(found: list[GenerationResult], expected: list[GenerationResult]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.output_token_ids.tolist() == other.output_token_ids.tolist(), one.request_id
        assert one.finish_reason is other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=ATOL)
        for name in ("top_logprobs", "prompt_logprobs"):
            own, theirs = getattr(one, name), getattr(other, name)
            assert (own is None) == (theirs is None)
            if own is not None:
                jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=ATOL), _arrays(own), _arrays(theirs))


def _arrays(logprobs: Any) -> tuple[np.ndarray, ...]:
    """Those of prompts but for the ranks of tokens that were never scored."""
    if hasattr(logprobs, "top"):
        return (logprobs.logprobs, *_arrays(logprobs.top))
    return (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)


def assert_no_leak(engine: LLMEngine) -> None:
    engine.check_invariants()
    assert engine.num_unfinished == 0
    for manager in engine.managers:
        assert (manager.usage, len(manager.request_table)) == (0, 0)


def both(**settings: Any) -> tuple[LLMEngine, LLMEngine]:
    return engine_of(1, **settings), engine_of(NUM_RANKS, **settings)


def check_sampling(**settings: Any) -> tuple[LLMEngine, LLMEngine]:
    """Log-probabilities of outputs and prompts, penalties, masks, bias, samples of one prompt."""
    one, ranks = both(**settings)
    every, params = workload()
    expected, found = one.generate(every, params), ranks.generate(every, params)
    assert_equal(found, expected)
    assert sum(result.stats.num_preemptions for result in found) > 0
    assert_no_leak(ranks)
    return one, ranks


def check_async_scheduling() -> None:
    """As without: a step is dispatched before the one before it is read."""
    check_sampling(async_scheduling=True)


def check_speculation() -> None:
    """Drafts of prompt lookup on both ranks; tokens are those without."""
    _one, ranks = check_sampling(speculative=SpeculativeConfig(num_drafts=3))
    assert sum(stats.num_accepted_tokens for stats in ranks.step_stats) > 0
    every, params = workload()
    assert_equal(ranks.generate(every, params), engine_of(1).generate(every, params))
    check_sampling(speculative=SpeculativeConfig(num_drafts=3), async_scheduling=True)


def check_priorities() -> None:
    """On each rank the urgent are served first; tokens do not change."""
    one, ranks = both()
    every = prompts() * 2
    urgencies = [{"priority": i % 3} for i in range(len(every))]
    found = ranks.generate(every, GREEDY, urgencies)
    assert_equal(found, one.generate(every, GREEDY, urgencies))
    firsts = [result.stats.first_token_time_s for result in found]
    means = [np.mean([t for i, t in enumerate(firsts) if i % 3 == p]) for p in range(3)]
    assert means == sorted(means), means


def check_life_cycle() -> None:
    """Sleep and wake with the host holding the cache, versions of weights, pins, reset, aborts."""
    ranks = engine_of(NUM_RANKS, tiers=TierConfig(host_bytes=1 << 24))
    every = prompts()
    expected = engine_of(1).generate(every, GREEDY)
    assert_equal(ranks.generate(every, GREEDY), expected)
    ranks.sleep()
    with pytest.raises(EngineClosedError, match="asleep"):
        ranks.generate(every, GREEDY)
    ranks.wake()
    found = ranks.generate(every, GREEDY)
    assert_equal(found, expected)
    assert sum(result.stats.num_cached_tokens for result in found) > sum(map(len, every)) // 2
    ranks.set_weights(2, ranks.model.module)
    (anew,) = ranks.generate(every[:1], GREEDY)
    assert anew.stats.num_cached_tokens == 0
    assert_equal([anew], expected[:1])
    pin = ranks.pin_prompt(every[0])
    assert pin is not None
    with pytest.raises(ValueError, match="expected sleep without pinned prefixes"):
        ranks.sleep()
    assert_equal(ranks.generate(every, GREEDY), expected)
    (again,) = ranks.generate([[*every[0], 1]], GREEDY)
    assert again.stats.num_cached_tokens >= pin.num_tokens
    ranks.unpin_prompt(pin)
    ids = [ranks.add_request(prompt, GREEDY) for prompt in every]
    ranks.step()
    assert isinstance(ranks._loop, RankLoops)
    assert all(loop.requests for loop in ranks._loop.by_rank)
    ranks.abort(ids[1])
    ranks.reset()
    assert_no_leak(ranks)
    assert_equal(ranks.generate(every, GREEDY), expected)


def check_metrics() -> None:
    """Counters are sums over ranks, as are those of the pools; usage is their mean."""
    one, ranks = both()
    every = prompts() * 2
    scraped = []
    for engine in (one, ranks):
        metrics = EngineMetrics(engine)
        engine.add_observer(metrics)
        engine.generate(every, GREEDY)
        scraped.append(metrics.registry)
    for name in ("generation_tokens_total", "prompt_tokens_total", "e2e_request_latency_seconds_count"):
        assert value(scraped[0], name) == value(scraped[1], name) > 0
    steps = ranks.step_stats
    assert value(scraped[1], "num_preemptions_total") == sum(step.num_preemptions for step in steps)
    assert value(scraped[1], "prefix_cache_queries_total") >= sum(map(len, every))
    assert value(scraped[1], "prefix_cache_hits_total") > 0
    pools = [manager.block_pools[0] for manager in ranks.managers]
    num_cached = sum(pool.num_cached_free_blocks for pool in pools)
    num_free = sum(pool.num_free_blocks for pool in pools)
    for state, count in (("held", 0), ("cached", num_cached), ("free", num_free - num_cached)):
        assert value(scraped[1], "kv_cache_blocks", pool="0", state=state) == count, state


CHECKS = {
    "sampling": check_sampling,
    "async": check_async_scheduling,
    "speculation": check_speculation,
    "priorities": check_priorities,
    "life": check_life_cycle,
    "metrics": check_metrics,
}

if __name__ == "__main__":
    for feature in sys.argv[1:]:
        CHECKS[feature]()
