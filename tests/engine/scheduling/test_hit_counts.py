"""Hits are what first admissions found: what a request finds again after it lost its blocks is none, in any counter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvjax.cli.generate.report import totals
from kvjax.core import MissReasons, PrefixCacheStats, Request
from tests.engine.fake_model import FakeEngine
from tests.engine.fake_tiers import FakeTiers

FIELDS = ("num_queried_tokens", "num_hit_tokens", "num_requeried_tokens", "num_refound_tokens")


def sums_of(engine: FakeEngine) -> list[int]:
    """Of `FIELDS`, over all steps."""
    return [sum(getattr(step, name) for step in engine.loop.step_stats) for name in FIELDS]


def run_in_a_small_pool(seed: int, **options: Any) -> FakeEngine:
    """Requests of two priorities whose outputs do not fit side by side, and whose prompts begin differently."""
    rng = np.random.default_rng(seed)
    engine = FakeEngine(36, depth=int(rng.integers(1, 3)), miss_reasons=MissReasons(), **options)
    for i in range(12):
        prompt = [i, *rng.integers(0, 2, int(rng.integers(4, 25))).tolist()]
        engine.add(f"r{i}", prompt, int(rng.integers(20, 50)), priority=int(rng.integers(2)))
        for _ in range(rng.integers(0, 6)):
            engine.step()
    return engine


@pytest.mark.parametrize(("first_seed", "has_tiers"), [(0, False), (10, False), (5, True), (15, True)])
def test_prompts_that_begin_differently_hit_nothing(first_seed: int, has_tiers: bool) -> None:
    """Each is looked up once for the first time, whether it is preempted, or its load is cancelled or fails."""
    num_refound = num_preemptions = 0
    for seed in range(first_seed, first_seed + 5):
        tiers: dict[str, Any] = {"make_tiers": lambda config, seed=seed: FakeTiers(config, seed, 9, 0.1)}
        engine = run_in_a_small_pool(seed, **tiers if has_tiers else {})
        engine.run()
        prompts = sum(one.request.num_prompt_tokens for one in engine.requests.values())
        assert sums_of(engine)[:2] == [prompts, 0]
        counted, reasons = engine.manager.make_prefix_cache_stats(), engine.manager.miss_reasons
        assert counted is not None
        assert reasons is not None
        assert (counted.requests, counted.queries, counted.hits) == (12, prompts, 0)
        assert (reasons.num_admitted, reasons.num_hit_tokens, reasons.num_missed_tokens.total()) == (12, 0, prompts)
        assert [one.stats.num_cached_tokens for one in engine.requests.values()] == [0] * 12
        report = totals(engine.results, list(engine.loop.step_stats), 1.0)
        assert (report["hit_tokens"], report["refound_tokens"]) == (0, sums_of(engine)[3])
        num_refound += report["refound_tokens"]
        num_preemptions += report["preemptions"]
    assert num_refound > 0
    assert num_preemptions > 0


@pytest.mark.parametrize("seed", range(20))
def test_steps_and_manager_count_what_each_admission_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lookup before each admission, the first of a request apart from those that follow."""
    found: dict[str, tuple[int, int]] = {}  # by request: its tokens, and those of them that its last lookup found
    expected, seen = Counter[str](), set[str]()
    engine = FakeEngine(36, depth=1 + seed % 2)
    look_up, admit = engine.manager.get_computed_blocks, engine.manager.allocate_slots

    def noted(request: Request) -> Any:
        blocks, num_tokens = look_up(request)
        found[request.request_id] = (request.num_tokens, num_tokens)
        return blocks, num_tokens

    def admitted(request: Request, *args: Any, **kwargs: Any) -> Any:
        is_new, blocks = request.row < 0, admit(request, *args, **kwargs)
        if is_new and blocks is not None:
            again = "preempted_" if request.request_id in seen else ""
            seen.add(request.request_id)
            for name, count in zip(("requests", "queries", "hits"), (1, *found[request.request_id]), strict=True):
                expected[again + name] += count
        return blocks

    monkeypatch.setattr(engine.manager, "get_computed_blocks", noted)
    monkeypatch.setattr(engine.manager, "allocate_slots", admitted)
    rng = np.random.default_rng(seed)
    for i in range(12):
        engine.add(f"s{i}", [0, *rng.integers(0, 2, int(rng.integers(4, 25))).tolist()], int(rng.integers(20, 50)))
    engine.run()
    assert engine.manager.make_prefix_cache_stats() == PrefixCacheStats(**expected)
    assert sums_of(engine) == [expected[name] for name in ("queries", "hits", "preempted_queries", "preempted_hits")]
    assert expected["preempted_hits"] > 0


def test_a_request_that_starts_again_after_an_exception_is_no_first_lookup() -> None:
    broken, engine = run_in_a_small_pool(3), FakeEngine(36)
    waited = [one for one in broken.loop.requests.values() if one.stats.num_cached_tokens is None]
    assert 0 < len(waited) < len(broken.loop.requests)
    engine.loop.take_over(broken.loop)
    engine.outputs = {name: [] for name in engine.loop.requests}
    while engine.scheduler.num_unfinished:
        engine.step()
    counted, queries = engine.manager.make_prefix_cache_stats(), sum(one.request.num_prompt_tokens for one in waited)
    assert counted is not None
    assert (counted.requests, counted.queries, counted.hits) == (len(waited), queries, 0)
    assert sum(step.num_queried_tokens for step in list(engine.loop.step_stats)) >= queries
