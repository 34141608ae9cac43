"""How an engine's caches are laid out: that of its model, and that of a draft model beside it.

Flow:    EngineConfig, models' specs -> [plan_caches] -> a KVCachePlan for the model and one for the draft model

The draft model's pools hold as many requests of `max_model_len` tokens as the model's: with `num_blocks` they come on
top, out of `memory_bytes` both are sized together. A draft model of fewer tokens holds requests of as many as it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from kvjax.core.spec import KVCacheSpec
from kvjax.engine.step.config import EngineConfig
from kvjax.models.config import ModelConfig
from kvjax.planning import CacheShape, KVCachePlan, Load, Parallelism, plan_kv_cache
from kvjax.planning.sizing import requests_that_fit, size_pools
from kvjax.planning.states.deployed_specs import deployed_specs
from kvjax.planning.states.ring_states import with_ring_states


def plan_caches(
    model: ModelConfig,
    config: EngineConfig,
    *,
    platform: str,
    parallel: Parallelism = Parallelism(),  # noqa: B008
    draft_model: ModelConfig | None = None,
    draft_parallel: Parallelism = Parallelism(),  # noqa: B008
) -> tuple[KVCachePlan, KVCachePlan | None]:
    """The plan of the model's cache, whose recurrent layers have a state for each draft, and of the draft model's.

    Each of the context ranks that share a page holds `config.block_size` tokens of it.

    Raises:
        ValueError, NotImplementedError: `ring_tokens` for a model without recurrent layers, or whose states take none.
        MemoryBudgetError: `memory_bytes` or `num_blocks` does not hold one request of `max_model_len` tokens.
    """
    num_drafts = config.num_drafts
    specs = model.kv_cache_specs(config.block_size * parallel.page_context, config.dtype)
    specs = deployed_specs(
        specs if config.ring_tokens is not None else with_drafts(specs, num_drafts),
        state_block_size=config.short_state_blocks,
        idle_state_dtype=config.idle_state_dtype if config.enable_prefix_caching else None,
    )
    if config.ring_tokens is not None:
        specs = with_ring_states(specs, config.ring_tokens, num_drafts)
    own: dict[str, Any] = {
        "max_model_len": config.max_model_len,
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "load": _load(config),
        "platform": platform,
        "parallel": parallel,
        "hybrid": config.hybrid,
        "shared_layers": model.shared_layers,
    }
    if draft_model is None:
        budget: dict[str, Any] = {"memory_bytes": config.memory_bytes, "num_blocks": config.num_blocks}
        return plan_kv_cache(specs, **budget, one_memory=config.shares_memory, **own), None
    draft_specs = draft_model.kv_cache_specs(config.block_size * draft_parallel.page_context, config.dtype)
    drafts = own | {
        "max_model_len": min(config.max_model_len, draft_model.max_model_len),
        "max_in_flight_tokens": config.max_num_batched_tokens + num_drafts,
        "parallel": draft_parallel,
        "shared_layers": draft_model.shared_layers,
    }
    needs, draft_needs = [_needs(*each) for each in ((specs, own), (draft_specs, drafts))]
    if config.memory_bytes is None:
        plan = plan_kv_cache(specs, num_blocks=config.num_blocks, **own)
        resident = plan.shape.needs(config.max_model_len, config.max_model_len, 1)
        requests = Fraction(max(requests_that_fit(resident, [pool.num_blocks for pool in plan.pools]), 1.0))
        num_blocks = [need.num_blocks(requests) for need in draft_needs]
        return plan, plan_kv_cache(draft_specs, num_blocks=num_blocks, **drafts)
    blocks = size_pools([*needs, *draft_needs], config.memory_bytes)
    shares = [need.bytes_per_block * size for need, size in zip([*needs, *draft_needs], blocks, strict=True)]
    plan = plan_kv_cache(specs, memory_bytes=sum(shares[: len(needs)]), one_memory=config.shares_memory, **own)
    return plan, plan_kv_cache(draft_specs, memory_bytes=sum(shares[len(needs) :]), **drafts)


def with_drafts(specs: Mapping[str, KVCacheSpec], num_drafts: int) -> dict[str, KVCacheSpec]:
    """The specs of layers that keep a recurrent state for each of `num_drafts` drafts, others as they are."""
    states: dict[str, Any] = {"num_speculative_blocks": num_drafts}
    return {name: spec if spec.state_pages is None else replace(spec, **states) for name, spec in specs.items()}


def _load(config: EngineConfig) -> Load:
    """What pools are balanced for: without a prefix cache, for requests that run and leave nothing."""
    if not config.enable_prefix_caching:
        return Load(config.max_model_len, max_running=None)
    return Load(config.tokens_per_checkpoint, config.max_num_seqs)


def _needs(specs: Mapping[str, KVCacheSpec], limits: Mapping[str, Any]) -> list[Any]:
    """What each pool of a cache costs and must hold."""
    shape = CacheShape.of(
        specs,
        platform=limits["platform"],
        parallel=limits["parallel"],
        hybrid=limits["hybrid"],
    )
    return shape.needs(limits["max_model_len"], limits["max_model_len"], limits["max_in_flight_tokens"])


__all__ = ["plan_caches", "with_drafts"]
