"""Caches of a model and its draft model, sized side by side. No jax."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.engine import EngineConfig, SpeculativeConfig
from kvjax.engine.step.cache_plans import plan_caches
from kvjax.errors import MemoryBudgetError
from kvjax.models.config import ModelConfig
from kvjax.planning import KVCachePlan, Load
from kvjax.planning.sizing import requests_that_fit
from tests.models.golden_models import model_folder

SPECULATIVE = SpeculativeConfig(method="draft_model", num_drafts=3)


def plans(name: str, draft: str, **settings: Any) -> tuple[KVCachePlan, KVCachePlan]:
    configs = [ModelConfig.from_folder(model_folder(one)) for one in (name, draft)]
    config = EngineConfig(**{"block_size": 8, "max_model_len": 128, "speculative": SPECULATIVE, **settings})
    plan, draft_plan = plan_caches(configs[0], config, platform="cpu", draft_model=configs[1])
    assert draft_plan is not None
    return plan, draft_plan


@pytest.mark.parametrize(("name", "draft"), [("llama", "gemma3"), ("gemma3", "llama"), ("jamba", "llama")])
def test_both_caches_hold_as_many_requests(name: str, draft: str) -> None:
    """Given blocks are the model's; the draft model's come on top."""
    plan, draft_plan = plans(name, draft, num_blocks=200)
    assert [pool.num_blocks for pool in plan.pools] == [200] * len(plan.pools)
    assert plan.concurrency <= draft_plan.concurrency
    requests = [
        requests_that_fit(one.shape.needs(128, 128, 1), [pool.num_blocks for pool in one.pools])
        for one in (plan, draft_plan)
    ]
    assert requests[0] <= requests[1]
    assert plans(name, draft, num_blocks=200, async_scheduling=True)[1].config == draft_plan.config


@pytest.mark.parametrize(("name", "draft"), [("llama", "gemma3"), ("gemma3", "llama")])
def test_memory_is_for_both_and_no_byte_beyond_it_is_taken(name: str, draft: str) -> None:
    memory_bytes = 8 << 20
    plan, draft_plan = plans(name, draft, memory_bytes=memory_bytes)
    used = plan.used_bytes + draft_plan.used_bytes
    assert memory_bytes * 0.98 < used <= memory_bytes
    # What no request fits in any more goes to one of them.
    assert min(plan.concurrency, draft_plan.concurrency) > 0.9 * max(plan.concurrency, draft_plan.concurrency)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"one_memory": False}, False),
        ({"eviction_policy": "probation"}, True),
        ({"eviction_policy": "lru"}, False),
        ({"release": "0.33.0"}, False),
        ({"memory_bytes": None, "num_blocks": 100}, False),
    ],
)
def test_kinds_share_the_memory_unless_something_says_otherwise(settings: dict[str, Any], expected: bool) -> None:
    sizes = {"block_size": 8, "max_model_len": 128, "memory_bytes": 8 << 20}
    model = ModelConfig.from_folder(model_folder("jamba"))
    plan, _ = plan_caches(model, EngineConfig(**sizes | settings), platform="cpu")
    assert (plan.slabs is not None) == expected


def test_memory_for_one_of_them_alone_is_too_little() -> None:
    own = EngineConfig(block_size=8, max_model_len=128, num_blocks=17)
    model = ModelConfig.from_folder(model_folder("llama"))
    alone, none = plan_caches(model, own, platform="cpu")
    assert none is None
    with pytest.raises(MemoryBudgetError, match="bytes short"):
        plans("llama", "llama", memory_bytes=alone.used_bytes)


def test_recurrent_layers_have_a_state_for_each_draft() -> None:
    plan, _ = plans("jamba", "llama", num_blocks=200)
    pages = [group.kv_cache_spec.state_pages for group in plan.config.kv_cache_groups]
    assert {one.num_drafts for one in pages if one is not None} == {3}


def test_pools_keep_what_the_settings_say() -> None:
    """A checkpoint for every so many tokens, beside those of what runs; without a prefix cache all is for what runs."""
    model = ModelConfig.from_folder(model_folder("jamba"))
    base = {"block_size": 8, "max_model_len": 512, "memory_bytes": 8 << 20, "max_num_seqs": 2}

    def load_of(**settings: Any) -> Load:
        return plan_caches(model, EngineConfig(**base | settings), platform="cpu")[0].load

    assert load_of() == Load(512, 2)
    assert load_of(tokens_per_checkpoint=64) == Load(64, 2)
    assert load_of(enable_prefix_caching=False) == Load(512, None)
    with pytest.raises(ValueError, match="expected tokens_per_checkpoint >= 1, got 0"):
        EngineConfig(num_blocks=9, tokens_per_checkpoint=0)
