"""Results of replays over several replicas, one a router, for people (text) and for programs (JSON-ready dicts).

Flow:    FleetResults -> [fleet_text | fleet_json] -> `kvjax replay --replicas`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from kvjax.replay.beyond.tiers import ReplayTierConfig
from kvjax.replay.recorder import Recorder
from kvjax.replay.replicas.fleet import FleetResult
from kvjax.replay.reports.report import quantiles, ratio
from kvjax.text import align_table, count_of, format_bytes
from kvjax.tiers.stats import TierStats


def fleet_json(result: FleetResult) -> dict[str, Any]:
    """What a replay found, as JSON values: tokens, virtual seconds; `imbalance` is the most over the mean."""
    recorders = result.recorders
    side = side_values(recorders, result.virtual_seconds)
    infinite = sum(recorder.infinite_hit_tokens for recorder in recorders)
    computed = [recorder.computed_tokens for recorder in recorders]
    values = {
        "router": result.router,
        "replicas": len(recorders),
        "num_blocks": [pool.num_blocks for pool in result.plan.pools],
        "block_size": result.config.block_size,
        "interrupted": not result.is_complete,
        "trace_requests": result.num_requests,
        "done_requests": result.num_done,
        "requests_by_replica": [recorder.requests for recorder in recorders],
        "output_tokens": sum(recorder.output_tokens for recorder in recorders),
        **side,
        "infinite_token_hit_rate": ratio(infinite, side["prompt_tokens"]),
        "computed_tokens_by_replica": computed,
        "imbalance": ratio(max(computed) * len(computed), sum(computed)),
        **time_values(recorders),
        "speed_model": vars(result.config.speed),
        "batching": vars(result.config.batching),
        "virtual_seconds": result.virtual_seconds,
        "wall_seconds": result.wall_seconds,
    }
    if result.config.tiers is not None:
        values["tiers"] = tier_values(result.config.tiers, result.tier_stats)
    return values


def side_values(recorders: Sequence[Recorder], virtual_seconds: float) -> dict[str, Any]:
    """Figures of some replicas: `busy` is the share of their time that they were in a step."""
    prompt_tokens = sum(recorder.prompt_tokens for recorder in recorders)
    hit_tokens = sum(recorder.hit_tokens for recorder in recorders)
    return {
        "refused_requests": sum(recorder.refused for recorder in recorders),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "token_hit_rate": ratio(hit_tokens, prompt_tokens),
        "preemptions": sum(recorder.preemptions for recorder in recorders),
        "busy": ratio(sum(recorder.busy_s for recorder in recorders), len(recorders) * virtual_seconds),
    }


def time_values(recorders: Sequence[Recorder]) -> dict[str, dict[str, float]]:
    """Seconds from arrival to a request's first, second and last token, and between its tokens on average."""
    return {
        name: quantiles(list(chain.from_iterable(times)))
        for name, times in (
            ("time_to_first_token_seconds", [recorder.ttft_s for recorder in recorders]),
            ("time_to_second_token_seconds", [recorder.second_token_s for recorder in recorders]),
            ("inter_token_seconds", [recorder.token_gap_s for recorder in recorders]),
            ("latency_seconds", [recorder.latency_s for recorder in recorders]),
        )
    }


def tier_values(tiers: ReplayTierConfig, stats: Sequence[TierStats]) -> dict[str, Any]:
    """The tiers of replicas, and what they have done together."""
    return vars(tiers) | {
        "loaded_tokens": sum(one.num_loaded_tokens for one in stats),
        "host_loads": sum(one.num_host_loads for one in stats),
        "disk_loads": sum(one.num_disk_loads for one in stats),
        "load_failures": sum(one.num_load_failures for one in stats),
    }


def tier_text(tiers: ReplayTierConfig) -> str:
    """The tiers of each replica in one line."""
    host = format_bytes(tiers.host_bytes) if tiers.host_blocks is None else count_of(tiers.host_blocks, "block")
    disk = "no disk"
    if tiers.disk_bytes:
        whose = "one disk for all" if tiers.shares_disk else "a disk each"
        disk = f"{whose} of {format_bytes(tiers.disk_bytes)} at {tiers.disk_bytes_per_s / 1e9:g} GB/s"
    return f"tiers: {host} of host memory each at {tiers.host_bytes_per_s / 1e9:g} GB/s, {disk}"


def fleet_text(results: Sequence[FleetResult]) -> str:
    """A row for each router, under what they share."""
    first, values = results[0], [fleet_json(result) for result in results]
    lines = [
        f"{count_of(first.num_requests, 'request')} over {count_of(len(first.recorders), 'replica')}, continuous "
        f"batching in virtual time",
        *replica_lines(first),
    ]
    if not all(result.is_complete for result in results):
        done = ", ".join(f"{one.num_done:,}" for one in results)
        lines.insert(0, f"interrupted after {done} of {count_of(first.num_requests, 'request')}; until then:")
    header = ["router", "hit rate", "first token", "90 %", "99 %", "last token", "busiest / mean", "busy", "preempted"]
    rows = [_row(one) for one in values]
    if first.config.tiers is not None:
        header.append("loaded from tiers")
        for row, one in zip(rows, values, strict=True):
            row.append(f"{one['tiers']['loaded_tokens']:,} tokens")
    ceiling = f"one infinite cache for all: {values[0]['infinite_token_hit_rate']:.2%}; times are medians and quantiles"
    return "\n".join(lines) + f"\n\n{align_table(header, rows, left={0})}\n{ceiling}"


def replica_lines(result: FleetResult) -> list[str]:
    """What each replica is."""
    config = result.config
    blocks = " + ".join(f"{pool.num_blocks:,}" for pool in result.plan.pools)
    lines = [
        f"each replica: {blocks} blocks of {config.block_size} tokens, {format_bytes(result.plan.used_bytes)}; "
        f"{config.manager_options.eviction_policy} eviction",
        f"speed model: {config.speed.describe()}",
    ]
    return lines if config.tiers is None else [*lines, tier_text(config.tiers)]


def seconds(times: dict[str, float], name: str) -> str:
    """One of a request's times, "-" where there are none."""
    return f"{times[name]:,.2f} s" if times else "-"


def _row(values: dict[str, Any]) -> list[str]:
    first, last = values["time_to_first_token_seconds"], values["latency_seconds"]
    return [
        values["router"],
        f"{values['token_hit_rate']:.2%}",
        *(seconds(first, name) for name in ("median", "p90", "p99")),
        seconds(last, "median"),
        f"{values['imbalance']:.3f}",
        f"{values['busy']:.1%}",
        f"{values['preemptions']:,}",
    ]


__all__ = [
    "fleet_json",
    "fleet_text",
    "replica_lines",
    "seconds",
    "side_values",
    "tier_text",
    "tier_values",
    "time_values",
]
