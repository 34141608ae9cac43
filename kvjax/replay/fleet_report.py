"""Results of replays over several replicas, one a router, for people (text) and for programs (JSON-ready dicts).

Flow:    FleetResults -> [fleet_text | fleet_json] -> `kvjax route`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from kvjax.replay.fleet import FleetResult
from kvjax.replay.report import quantiles, ratio
from kvjax.text import align_table, count_of, format_bytes


def fleet_json(result: FleetResult) -> dict[str, Any]:
    """What a replay found, as JSON values: tokens, virtual seconds; `imbalance` is the most over the mean."""
    recorders = result.recorders
    prompt_tokens = sum(recorder.prompt_tokens for recorder in recorders)
    hit_tokens = sum(recorder.hit_tokens for recorder in recorders)
    infinite = sum(recorder.infinite_hit_tokens for recorder in recorders)
    computed = [recorder.computed_tokens for recorder in recorders]
    return {
        "router": result.router,
        "replicas": len(recorders),
        "num_blocks": [pool.num_blocks - 1 for pool in result.plan.pools],
        "block_size": result.config.block_size,
        "interrupted": not result.is_complete,
        "trace_requests": result.num_requests,
        "done_requests": result.num_done,
        "refused_requests": sum(recorder.refused for recorder in recorders),
        "requests_by_replica": [recorder.requests for recorder in recorders],
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(recorder.output_tokens for recorder in recorders),
        "hit_tokens": hit_tokens,
        "token_hit_rate": ratio(hit_tokens, prompt_tokens),
        "infinite_token_hit_rate": ratio(infinite, prompt_tokens),
        "computed_tokens_by_replica": computed,
        "imbalance": ratio(max(computed) * len(computed), sum(computed)),
        "preemptions": sum(recorder.preemptions for recorder in recorders),
        "time_to_first_token_seconds": quantiles(list(chain.from_iterable(r.ttft_s for r in recorders))),
        "latency_seconds": quantiles(list(chain.from_iterable(r.latency_s for r in recorders))),
        "speed_model": vars(result.config.speed),
        "batching": vars(result.config.batching),
        "virtual_seconds": result.virtual_seconds,
        "wall_seconds": result.wall_seconds,
    }


def fleet_text(results: Sequence[FleetResult]) -> str:
    """A row for each router, under what they share."""
    first, values = results[0], [fleet_json(result) for result in results]
    blocks = " + ".join(f"{count:,}" for count in values[0]["num_blocks"])
    lines = [
        f"{count_of(first.num_requests, 'request')} over {count_of(len(first.recorders), 'replica')}, continuous "
        f"batching in virtual time",
        f"each replica: {blocks} blocks of {first.config.block_size} tokens, {format_bytes(first.plan.used_bytes)}; "
        f"{first.config.eviction_policy} eviction",
        f"speed model: {first.config.speed.describe()}",
    ]
    if not all(result.is_complete for result in results):
        lines.insert(0, "interrupted; what was done until then:")
    header = ["router", "hit rate", "first token", "90 %", "99 %", "last token", "busiest / mean", "preempted"]
    table = align_table(header, [_row(one) for one in values], left={0})
    ceiling = f"one infinite cache for all: {values[0]['infinite_token_hit_rate']:.2%}; times are medians and quantiles"
    return "\n".join(lines) + f"\n\n{table}\n{ceiling}"


def _row(values: dict[str, Any]) -> list[str]:
    first, last = values["time_to_first_token_seconds"], values["latency_seconds"]
    times = [f"{first[key]:,.2f} s" if first else "-" for key in ("median", "p90", "p99")]
    return [
        values["router"],
        f"{values['token_hit_rate']:.2%}",
        *times,
        f"{last['median']:,.2f} s" if last else "-",
        f"{values['imbalance']:.3f}",
        f"{values['preemptions']:,}",
    ]


__all__ = ["fleet_json", "fleet_text"]
