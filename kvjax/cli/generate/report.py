"""What a run of `kvjax generate` cost, as text and as JSON.

Flow:    results, StepStats -> [request_table, totals_lines, report_json] -> stdout, --json FILE
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvjax.core import MissReason
from kvjax.engine.requests.outputs import FinishReason, GenerationResult
from kvjax.engine.requests.stats import RequestStats, StepStats
from kvjax.text import align_table, count_of


def request_table(results: Mapping[str, GenerationResult]) -> str:
    """A line per request: tokens, what was cached and computed, speed."""
    header = ["request", "prompt", "cached", "computed", "output", "preempted", "first token", "tokens/s", "ended by"]
    rows = []
    for name, result in results.items():
        stats = result.stats
        first, speed = stats.time_to_first_token_s, stats.output_tokens_per_s
        rows.append(
            [
                name,
                f"{stats.num_prompt_tokens:,}",
                f"{stats.num_cached_tokens or 0:,}",
                f"{stats.num_computed_tokens:,}",
                f"{stats.num_output_tokens:,}",
                f"{stats.num_preemptions:,}",
                "-" if first is None else f"{first * 1e3:,.0f} ms",
                "-" if speed is None else f"{speed:,.1f}",
                result.finish_reason.value,
            ]
        )
    return align_table(header, rows, left={0, 8})


def totals(results: Mapping[str, GenerationResult], steps: Sequence[StepStats], wall_s: float) -> dict[str, Any]:
    """Sums over the run.

    `hit_tokens` counts first admissions, `refound_tokens` what was still cached after a preemption, and
    `recomputed_tokens` what preemption cost. `queried_tokens` are the prompts that were looked up: not those of samples
    that have `shared_tokens` from the first of their prompt, nor of requests that an interrupt left waiting.
    `missed_tokens` are by reason, if misses are explained. Of `draft_tokens` verified, each of the `accepted_tokens`
    saved its request a step; `tokens_per_decode_step` counts those steps of all requests that wrote any but their first
    token.
    """
    stats = [result.stats for result in results.values()]
    prompt_tokens = sum(each.num_prompt_tokens for each in stats)
    shared_tokens = sum(each.num_shared_tokens for each in stats)
    hit_tokens = sum(each.num_cached_tokens or 0 for each in stats) - shared_tokens
    queried_tokens = sum(
        each.num_prompt_tokens for each in stats if each.num_cached_tokens is not None and not each.num_shared_tokens
    )
    computed = sum(each.num_computed_tokens for each in stats)
    output_tokens = sum(each.num_output_tokens for each in stats)
    host_us = [step.host_us for step in steps] or [0.0]
    inputs = prompt_tokens + output_tokens - len(stats)  # the last token of each is never an input
    needed = inputs - hit_tokens - shared_tokens
    decoded = sum(max(each.num_output_tokens - 1, 0) for each in stats)
    accepted = sum(each.num_accepted_tokens for each in stats)
    return {
        "requests": len(stats),
        "prompt_tokens": prompt_tokens,
        "queried_tokens": queried_tokens,
        "hit_tokens": hit_tokens,
        "token_hit_rate": hit_tokens / queried_tokens if queried_tokens else 0.0,
        "missed_tokens": _missed_tokens(stats),
        "shared_tokens": shared_tokens,
        "computed_tokens": computed,
        "recomputed_tokens": max(computed - needed, 0),
        "refound_tokens": sum(step.num_refound_tokens for step in steps),
        "output_tokens": output_tokens,
        "draft_tokens": sum(each.num_draft_tokens for each in stats),
        "accepted_tokens": accepted,
        "tokens_per_decode_step": decoded / (decoded - accepted) if decoded else 0.0,
        "preemptions": sum(each.num_preemptions for each in stats),
        "steps": len(steps),
        "released_blocks": sum(pool.released for step in steps for pool in step.pools),
        "wall_s": wall_s,
        "output_tokens_per_s": output_tokens / wall_s if wall_s > 0 else 0.0,
        "host_us_per_step": statistics.fmean(host_us),
        "host_us_per_step_median": statistics.median(host_us),
    }


def _missed_tokens(stats: Sequence[RequestStats]) -> dict[str, int]:
    """By reason, in the order of `MissReason`; with the hits they add up to the prompts looked up."""
    missed: Counter[MissReason] = Counter()
    for each in stats:
        missed.update(each.num_missed_tokens or {})
    return {reason.value: missed[reason] for reason in MissReason if missed[reason]}


def totals_lines(sums: Mapping[str, Any]) -> list[str]:
    """The totals in words."""
    lines = [
        f"{count_of(sums['requests'], 'request')} in {sums['wall_s']:.1f} s and {count_of(sums['steps'], 'step')}: "
        f"{sums['output_tokens']:,} tokens written, {sums['output_tokens_per_s']:,.0f} a second; "
        f"the host's share of a step is {sums['host_us_per_step_median']:,.0f} us (median).",
        f"Prefix cache: {sums['hit_tokens']:,} of {sums['queried_tokens']:,} prompt tokens were found "
        f"({sums['token_hit_rate']:.1%}) and not computed.",
    ]
    if sums["shared_tokens"]:
        lines.append(f"Further samples of a prompt shared {sums['shared_tokens']:,} prompt tokens with the first.")
    if sums["draft_tokens"]:
        lines.append(
            f"Speculation: {sums['accepted_tokens']:,} of {sums['draft_tokens']:,} drafts were accepted "
            f"({sums['accepted_tokens'] / sums['draft_tokens']:.1%}): {sums['tokens_per_decode_step']:.2f} tokens a "
            f"decoding step of a request, and {count_of(sums['accepted_tokens'], 'such step')} saved."
        )
    if sums["released_blocks"]:
        lines.append(f"Sliding windows gave {sums['released_blocks']:,} blocks back while their requests went on.")
    if sums["preemptions"]:
        lines.append(
            f"Blocks ran out: {count_of(sums['preemptions'], 'preemption')}, after which "
            f"{count_of(sums['refound_tokens'], 'token')} were still cached and {sums['recomputed_tokens']:,} had to "
            "be computed again."
        )
    return lines


def report_json(
    results: Mapping[str, GenerationResult],
    texts: Mapping[str, str],
    steps: Sequence[StepStats],
    wall_s: float,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the text report says, and every step."""
    requests = []
    for name, result in results.items():
        stats = asdict(result.stats)
        stats |= {
            "name": name,
            "text": texts[name],
            "output_token_ids": result.output_token_ids.tolist(),
            "finish_reason": result.finish_reason.value,
            "time_to_first_token_s": result.stats.time_to_first_token_s,
            "output_tokens_per_s": result.stats.output_tokens_per_s,
        }
        requests.append(stats)
    return {
        "config": dict(config),
        "interrupted": any(result.finish_reason is FinishReason.ABORT for result in results.values()),
        "totals": totals(results, steps, wall_s),
        "requests": requests,
        "steps": [asdict(step) for step in steps],
    }
