"""Prefill and decode apart beside as many mixed replicas, for people (text) and for programs (a JSON-ready dict).

Flow:    SplitResult, FleetResult -> [split_text | split_json] -> `kvjax replay --prefill-replicas`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.replay.recorder import Recorder
from kvjax.replay.replicas.fleet import FleetResult
from kvjax.replay.replicas.split import SplitResult
from kvjax.replay.reports.fleet_report import fleet_json, replica_lines, seconds, side_values, tier_values, time_values
from kvjax.replay.reports.report import ratio
from kvjax.text import align_table, count_of, format_bytes


def split_json(result: SplitResult, mixed: FleetResult) -> dict[str, Any]:
    """Both, as JSON values: bytes are those of one device of each replica; `link_busy` is of the receivers' links."""
    transfer, virtual_s = result.split.transfer, result.virtual_seconds
    sending_s = result.sent_bytes / transfer.bytes_per_s + result.num_transfers * transfer.latency_s
    values = {
        "router": result.router,
        "prefill_replicas": result.split.num_prefill,
        "decode_replicas": result.split.num_decode,
        "interrupted": not (result.is_complete and mixed.is_complete),
        "trace_requests": result.num_requests,
        "done_requests": result.num_done,
        "prefill": _side(result.prefill, virtual_s),
        "decode": _side(result.decode, virtual_s),
        **time_values(result.prefill + result.decode),
        "transfer": vars(transfer)
        | {
            "sent_bytes": result.sent_bytes,
            "sent_tokens": result.sent_tokens,
            "transfers": result.num_transfers,
            "link_busy": ratio(sending_s, result.split.num_decode * virtual_s),
        },
        "virtual_seconds": virtual_s,
        "wall_seconds": result.wall_seconds,
        "mixed": fleet_json(mixed),
    }
    if result.config.tiers is not None:
        values["tiers"] = tier_values(result.config.tiers, result.tier_stats)
    return values


def split_text(result: SplitResult, mixed: FleetResult) -> str:
    """A table of times, one of sides, and what was sent."""
    values, split = split_json(result, mixed), result.split
    apart = f"{split.num_prefill} prefill + {split.num_decode} decode"
    lines = [
        f"{count_of(result.num_requests, 'request')}, {apart} replicas beside {len(mixed.recorders)} mixed ones, "
        f"{result.router} router, continuous batching in virtual time",
        *replica_lines(mixed),
    ]
    if result.config.tiers is not None:
        lines[-1] += "; of mixed and prefill replicas"
    if values["interrupted"]:
        lines.insert(
            0,
            f"interrupted after {result.num_done:,} and {mixed.num_done:,} of "
            f"{count_of(result.num_requests, 'request')}; until then:",
        )
    header = ["from arrival to", "first token", "90 %", "second token", "90 %", "last token", "between tokens", "90 %"]
    times = align_table(header, [_times(apart, values), _times("mixed", values["mixed"])], left={0})
    sides = [
        _side_row("prefill", split.num_prefill, values["prefill"]),
        _side_row("decode", split.num_decode, values["decode"]),
        _side_row("mixed", len(mixed.recorders), values["mixed"]),
    ]
    sent = values["transfer"]
    return "\n".join(
        [
            *lines,
            "",
            times,
            "(medians and quantiles; the first token is the prefill replica's, the second one waits for the transfer)",
            "",
            align_table(["side", "replicas", "hit rate", "busy", "preempted", "refused"], sides, left={0}),
            f"one infinite cache for all: {values['mixed']['infinite_token_hit_rate']:.2%}",
            f"sent: {format_bytes(sent['sent_bytes'])} for {sent['sent_tokens']:,} tokens in "
            f"{count_of(sent['transfers'], 'transfer')} at {sent['bytes_per_s'] / 1e9:g} GB/s and "
            f"{1e6 * sent['latency_s']:g} us; links of decode replicas busy {sent['link_busy']:.1%}",
        ]
    )


def _side(recorders: Sequence[Recorder], virtual_seconds: float) -> dict[str, Any]:
    return side_values(recorders, virtual_seconds) | {
        "requests_by_replica": [recorder.requests for recorder in recorders],
        "computed_tokens_by_replica": [recorder.computed_tokens for recorder in recorders],
    }


def _times(name: str, values: dict[str, Any]) -> list[str]:
    first, second = values["time_to_first_token_seconds"], values["time_to_second_token_seconds"]
    gap = values["inter_token_seconds"]
    return [
        name,
        *(seconds(times, key) for times in (first, second) for key in ("median", "p90")),
        seconds(values["latency_seconds"], "median"),
        *(f"{1e3 * gap[key]:,.1f} ms" if gap else "-" for key in ("median", "p90")),
    ]


def _side_row(name: str, num_replicas: int, values: dict[str, Any]) -> list[str]:
    return [
        name,
        str(num_replicas),
        f"{values['token_hit_rate']:.2%}",
        f"{values['busy']:.1%}",
        f"{values['preemptions']:,}",
        f"{values['refused_requests']:,}",
    ]


__all__ = ["split_json", "split_text"]
