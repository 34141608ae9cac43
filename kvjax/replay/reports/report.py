"""A replay's result for people (text) and for programs (a JSON-ready dict).

Flow:    ReplayResult -> [result_text | result_json] -> `kvjax replay`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.core.misses.lookup_report import MissReason
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.planning.report import load_words
from kvjax.replay.misses import miss_table
from kvjax.replay.replay import ReplayResult
from kvjax.text import align_table, count_of, format_bytes

QUANTILES = (0.5, 0.9, 0.99)


def result_json(result: ReplayResult) -> dict[str, Any]:
    """Everything that a replay found, as JSON values: tokens, blocks, virtual seconds, microseconds of CPU time."""
    recorder, config = result.recorder, result.config
    options = config.manager_options
    values: dict[str, Any] = {
        "mode": "serial" if config.serial else "batched",
        "block_size": config.block_size,
        "num_blocks": [pool.num_blocks for pool in result.plan.pools],
        "memory_bytes": result.plan.used_bytes,
        "load": vars(result.plan.load),
        "max_model_len": result.plan.max_model_len,
        "hash_algorithm": config.hash_algorithm,
        "release": config.release,
        "free_order": options.rules.free_order,
        "eviction_policy": options.eviction_policy,
        "retention_interval": options.retention_interval,
        "interrupted": not result.is_complete,
        "trace_requests": result.num_requests,
        "done_requests": result.num_done,
        "requests": recorder.requests,
        "refused_requests": recorder.refused,
        "prompt_tokens": recorder.prompt_tokens,
        "output_tokens": recorder.output_tokens,
        "computed_tokens": recorder.computed_tokens,
        "hit_tokens": recorder.hit_tokens,
        "token_hit_rate": ratio(recorder.hit_tokens, recorder.prompt_tokens),
        "infinite_hit_tokens": recorder.infinite_hit_tokens,
        "infinite_token_hit_rate": ratio(recorder.infinite_hit_tokens, recorder.prompt_tokens),
        "prompt_blocks": recorder.prompt_blocks,
        "hit_blocks": recorder.hit_tokens // config.block_size,
        "block_hit_rate": ratio(recorder.hit_tokens // config.block_size, recorder.prompt_blocks),
        "infinite_hit_blocks": recorder.infinite_hit_tokens // config.block_size,
        "infinite_block_hit_rate": ratio(recorder.infinite_hit_tokens // config.block_size, recorder.prompt_blocks),
        "registered_blocks": sum(pool.num_hashed_blocks + pool.num_evicted_blocks for pool in recorder.pools),
        "preemptions": recorder.preemptions,
        "steps": len(recorder.host_ns),
        **_host_times(recorder.host_ns),
        "virtual_seconds": result.virtual_seconds,
        "wall_seconds": result.wall_seconds,
        "occupancy": _occupancy(result),
        "block_residency": _residency(result),
    }
    if result.tier_stats is not None and config.tiers is not None:
        values["tiers"] = vars(config.tiers) | {"counts": vars(result.tier_stats)}
    if config.explain_misses:
        values["misses"] = _miss_values(result)
    if not config.serial:
        values["speed_model"] = vars(config.speed)
        values["batching"] = vars(config.batching)
        values["max_running_requests"] = recorder.max_running
        values["max_waiting_requests"] = recorder.max_waiting
        values["time_to_first_token_seconds"] = quantiles(recorder.ttft_s)
        values["latency_seconds"] = quantiles(recorder.latency_s)
    return values


def result_text(result: ReplayResult) -> str:
    """The same for a person, a paragraph per question."""
    values = result_json(result)
    parts = [_what(result), _hits(values), _pool(values), _host(result, values)]
    if not result.config.serial:
        parts.insert(2, _service(values))
    if result.config.explain_misses:
        parts.insert(2, _misses(result, values["misses"]))
    return "\n\n".join(parts)


def _what(result: ReplayResult) -> str:
    recorder, config, options = result.recorder, result.config, result.config.manager_options
    blocks = " + ".join(f"{pool.num_blocks:,}" for pool in result.plan.pools)
    mode = "one at a time" if config.serial else "continuous batching in virtual time"
    lines = [
        f"{count_of(recorder.requests, 'request')}, {mode}; {recorder.prompt_tokens:,} prompt tokens"
        + ("" if config.serial else f", {recorder.output_tokens:,} output tokens"),
        f"cache: {blocks} blocks of {config.block_size} tokens, {format_bytes(result.plan.used_bytes)}; "
        f"{config.hash_algorithm}, {options.eviction_policy} eviction{_appends(options)}",
    ]
    if not result.is_complete:
        all_requests = count_of(result.num_requests, "request")
        lines.insert(0, f"interrupted after {result.num_done:,} of {all_requests}; until then:")
    if config.release is not None:
        lines.append(f"caching and eviction by the rules of vLLM {config.release}")
    if (tokens := options.retention_interval) is not None:
        every = f", and every {tokens:,} tokens" if isinstance(tokens, int) and tokens else ""
        lines.append(f"windows, chunks and states are kept where requests end or part{every}")
    if result.plan.slabs is not None:
        slabs = f"{result.plan.num_slabs - 1:,} slabs of {format_bytes(result.plan.slabs.bytes_per_slab)}"
        lines.append(f"pools share {slabs}: as many blocks as above where one pool has all of them")
    elif len(result.plan.pools) > 1 and config.memory_bytes is not None:
        lines.append(f"pools are balanced for {load_words(result.plan.load)}")
    if not config.serial:
        lines.append(f"speed model: {config.speed.describe()}")
    if recorder.refused:
        lines.append(f"refused, since larger than the cache: {count_of(recorder.refused, 'request')}")
    return "\n".join(lines)


def _appends(options: ManagerOptions) -> str:
    return ", unhashed blocks in turn" if options.rules.free_order == "append" else ""


def _hits(values: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{values[hit]:,}", f"{values[total]:,}", f"{values[rate]:.2%}"]
        for name, hit, total, rate in (
            ("tokens, this cache", "hit_tokens", "prompt_tokens", "token_hit_rate"),
            ("tokens, infinite cache", "infinite_hit_tokens", "prompt_tokens", "infinite_token_hit_rate"),
            ("blocks, this cache", "hit_blocks", "prompt_blocks", "block_hit_rate"),
            ("blocks, infinite cache", "infinite_hit_blocks", "prompt_blocks", "infinite_block_hit_rate"),
        )
    ]
    return align_table(["prefix hits of", "hit", "of", "rate"], rows, left={0})


def _misses(result: ReplayResult, misses: Mapping[str, Any]) -> str:
    remembered = count_of(result.config.max_evicted_blocks, "block")
    parts = [
        miss_table(result.recorder.hit_tokens, misses["tokens"]),
        f"(never seen: by this cache, as far as it remembers {remembered} that a pool evicted)",
    ]
    if misses["evicted_seconds_ago"]:
        rows = [
            [name, *(f"{value:,.1f}" for value in misses[key].values())]
            for name, key in (("seconds", "evicted_seconds_ago"), ("evictions", "evicted_blocks_ago"))
        ]
        parts.append(align_table(["evicted how long ago", "mean", "median", "90 %", "99 %", "most"], rows, left={0}))
    if misses["blocks_short"]:
        rows = [
            [pool_id, *(f"{value:,.0f}" for value in values.values())]
            for pool_id, values in misses["blocks_short"].items()
        ]
        parts.append(align_table(["more blocks of pool", "mean", "median", "90 %", "99 %", "most"], rows, left={0}))
    if misses["tokens_short"]:
        groups = result.plan.config.kv_cache_groups
        rows = [
            [f"{group_id} ({groups[int(group_id)].kv_cache_spec.kind})", f"{count:,}"]
            for group_id, count in misses["tokens_short"].items()
        ]
        parts.append(align_table(["group that limits hits", "tokens less than the best"], rows, left={0}))
    return "\n".join(parts)


def _service(values: Mapping[str, Any]) -> str:
    rows = [
        [name, *(f"{value:,.2f} s" for value in values[key].values())]
        for name, key in (("first token", "time_to_first_token_seconds"), ("last token", "latency_seconds"))
        if values[key]
    ]
    table = align_table(["from arrival to", "mean", "median", "90 %", "99 %", "most"], rows, left={0})
    rate = ratio(values["output_tokens"], values["virtual_seconds"])
    return (
        f"{table}\n{values['virtual_seconds']:,.0f} s of virtual time, {values['computed_tokens']:,} tokens computed, "
        f"{rate:,.0f} output tokens/s\n"
        f"{count_of(values['preemptions'], 'preemption')}; at most {values['max_running_requests']:,} requests ran and "
        f"{values['max_waiting_requests']:,} waited"
    )


def _pool(values: Mapping[str, Any]) -> str:
    occupancy, residency = values["occupancy"], values["block_residency"]
    lines = [
        f"blocks held in a step: {occupancy['mean_held']:.1%} on average, {occupancy['max_held']:.1%} at most; "
        f"free but cached: {occupancy['mean_cached']:.1%} on average",
        f"blocks that were cached at some time: {values['registered_blocks']:,}",
    ]
    if residency["sampled_evictions"]:
        rows = [
            [name, *(f"{value:,.1f} s" for value in residency[key].values())]
            for name, key in (
                ("lifetime of a block's contents", "lifetime_seconds"),
                ("idle before eviction", "idle_seconds"),
                ("between two hits", "reuse_gap_seconds"),
            )
            if residency[key]
        ]
        lines.append(align_table(["virtual time", "mean", "median", "90 %", "99 %", "most"], rows, left={0}))
        lines.append(f"(of {residency['sampled_evictions']:,} sampled evictions)")
    else:
        lines.append("no sampled block was evicted")
    return "\n".join(lines)


def _host(result: ReplayResult, values: Mapping[str, Any]) -> str:
    what, whose = ("request", "managers") if result.config.serial else ("step", "scheduler and managers")
    return (
        f"CPU time of {whose}: {values['host_us_per_step']:,.0f} us a {what} on average, "
        f"{values['host_us_per_step_median']:,.0f} median, {values['host_us_per_step_p99']:,.0f} at 99 %\n"
        f"{count_of(values['steps'], what)} in {values['wall_seconds']:.1f} s, with making and hashing the prompts"
    )


def _host_times(host_ns: Sequence[int]) -> dict[str, float]:
    us = np.array(host_ns or [0], np.float64) / 1e3
    return {
        "host_us_per_step": float(us.mean()),
        "host_us_per_step_median": float(np.median(us)),
        "host_us_per_step_p99": float(np.quantile(us, 0.99)),
    }


def _occupancy(result: ReplayResult) -> dict[str, float]:
    """Shares of all blocks: averages over the samples, the maximum over all steps."""
    total = sum(pool.num_blocks - 1 for pool in result.plan.pools)
    held = np.array([sample.held_blocks for sample in result.recorder.samples] or [0]) / total
    cached = np.array([sample.cached_blocks for sample in result.recorder.samples] or [0]) / total
    most = result.recorder.max_held_blocks / total
    return {"mean_held": float(held.mean()), "max_held": most, "mean_cached": float(cached.mean())}


def _miss_values(result: ReplayResult) -> dict[str, Any]:
    misses = result.misses
    return {
        "tokens": {reason.value: misses.tokens[reason] for reason in MissReason if misses.tokens[reason]},
        "evicted_seconds_ago": quantiles(misses.evicted_seconds_ago),
        "evicted_blocks_ago": quantiles(misses.evicted_blocks_ago),
        "blocks_short": {str(pool_id): quantiles(counts) for pool_id, counts in sorted(misses.blocks_short.items())},
        "tokens_short": {str(group_id): count for group_id, count in sorted(misses.tokens_short.items())},
    }


def _residency(result: ReplayResult) -> dict[str, Any]:
    events = result.residencies
    return {
        "sampled_evictions": len(events),
        "lifetime_seconds": quantiles([event.lifetime_seconds for event in events]),
        "idle_seconds": quantiles([event.idle_seconds for event in events]),
        "reuse_gap_seconds": quantiles([gap for event in events for gap in event.reuse_gaps_seconds]),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90 %, 99 % and maximum; empty for no values."""
    if not values:
        return {}
    array = np.array(values)
    named = zip(("median", "p90", "p99"), np.quantile(array, QUANTILES).tolist(), strict=True)
    return {"mean": float(array.mean()), **dict(named), "max": float(array.max())}


def ratio(part: float, whole: float) -> float:
    """`part / whole`, 0 of nothing."""
    return part / whole if whole else 0.0
