"""`kvjax replay`: a trace or a generated workload through the real cache managers, without a model.

Flow:    arguments -> [run] -> kvjax.replay.run_replay -> text, JSON, plots; of several replicas: replay_replicas
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from kvjax.cli.help_text import Example
from kvjax.cli.options.replay import (
    add_cache_arguments,
    add_speed_arguments,
    add_tier_arguments,
    add_workload_arguments,
    config_of,
    tiers_of,
    trace_of,
)
from kvjax.cli.options.types import positive_int
from kvjax.cli.pictures.figures import save_figure
from kvjax.cli.replay.calls import make_calls
from kvjax.cli.replay.compare import add_compare_arguments, run_compare, wants_comparison
from kvjax.cli.replay.plot import draw_replay, workload_name
from kvjax.cli.replay.replicas import add_replica_arguments, run_replicas, wants_replicas
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import (
    PLOTS,
    STANDARD,
    input_file,
    name_of,
    named_file,
    output_file,
    plot_file,
    require_matplotlib,
    target_of,
    write_json,
    writing,
)
from kvjax.cli.running.progress import progress
from kvjax.errors import ConfigError
from kvjax.replay import ReplayConfig, result_json, result_text, run_replay, write_trace
from kvjax.replay.bounds import bounds_json, bounds_text, find_bounds

EXAMPLES = (
    Example(
        "Replay a generated chat in 2,000 blocks.", "kvjax replay --generate chat --num-requests 20 --num-blocks 2000"
    ),
    Example(
        "Compare two routers over two replicas on a trace of your own.",
        "kvjax replay trace.jsonl --memory 4GiB --replicas 2 --router round_robin --router prefix",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax replay`."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        type=input_file,
        help="Read request lines, Azure's or BurstGPT's CSV, conversations, prompts or agents' sessions, also gzipped. "
        "- reads standard input.",
    )
    parser.add_argument(
        "--calls",
        type=input_file,
        metavar="FILE",
        help="Make the calls that --record wrote again instead, and compare the answers. - reads standard input.",
    )
    workload = parser.add_argument_group("workload")
    add_workload_arguments(workload)
    workload.add_argument(
        "--write", type=output_file, metavar="FILE", help=f"Write the requests as a trace, and stop. {STANDARD}"
    )
    add_cache_arguments(parser.add_argument_group("cache"))
    add_tier_arguments(parser.add_argument_group("tiers beyond the cache"))
    add_replica_arguments(parser.add_argument_group("several replicas"))
    add_compare_arguments(parser.add_argument_group("many models and memory sizes"))
    batching = parser.add_argument_group("continuous batching in virtual time")
    batching.add_argument(
        "--serial", action="store_true", help="Look up, allocate and free one request at a time instead."
    )
    add_speed_arguments(batching)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=output_file, metavar="FILE", help=f"Write the result as JSON. {STANDARD}")
    output.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help=f"Draw hits, occupancy, queue and block lifetimes; of many models hits by memory or users. {PLOTS}",
    )
    output.add_argument("--record", type=named_file, metavar="FILE", help="Write the manager's calls, for --calls.")
    output.add_argument(
        "--miss-reasons", action="store_true", help="Say why prompt tokens missed. Its time counts as the managers'."
    )
    output.add_argument(
        "--remember-evicted",
        type=positive_int,
        default=ReplayConfig.max_evicted_blocks,
        metavar="N",
        help="Let --miss-reasons know the last N blocks that a pool evicted.",
    )
    output.add_argument(
        "--bound",
        action="store_true",
        help="Say too what the bytes would hit if they were exchanged freely, and by who knows the trace.",
    )
    output.add_argument("--no-progress", action="store_true", help="Show no progress bar, as off a terminal.")


def run(args: argparse.Namespace) -> int:
    """Replays and prints the result, or what there is of it when an interrupt comes; 0, 130 then, 1: all were refused.

    Raises:
        TraceError: a trace of an unknown form, or a bad line of it.
        ConfigError: neither or both of a trace and --generate, options that contradict one another, or a bad model.
        MemoryBudgetError: the cache holds no request.
        MissingExtraError: --plot without matplotlib.
        CallLogError: --calls with a file of none, or an answer that differs.
    """
    if args.calls is not None:
        if args.trace is not None or args.generate is not None:
            raise ConfigError("expected --calls without a TRACE or --generate, got both: a record has its own requests")
        return make_calls(args.calls, with_progress=not args.no_progress)
    over_replicas = wants_replicas(args)
    if wants_comparison(args) and args.write is None:
        return run_compare(args)
    trace, read_as = trace_of(args)
    source = _source(args, read_as)
    if args.write is not None:
        with writing(args.write):
            write_trace(trace, target_of(args.write))
        num_tokens = sum(request.input_length for request in trace)
        print(f"wrote {len(trace):,} requests, {num_tokens:,} prompt tokens, to {name_of(args.write)}")
        return 0
    if over_replicas:
        return run_replicas(args, trace, source)
    if args.plot is not None:
        require_matplotlib("--plot")  # before minutes of work
    config = replace(
        config_of(args),
        serial=args.serial,
        tiers=tiers_of(args),
        explain_misses=args.miss_reasons,
        max_evicted_blocks=args.remember_evicted,
    )
    with (
        interruptible() as should_stop,
        progress("Replaying", len(trace), "request", enabled=not args.no_progress) as advance,
    ):
        result = run_replay(trace, config, advance, args.record, should_stop)
    values = source | result_json(result)
    print(result_text(result))
    if args.bound and result.is_complete:
        beyond_bytes = getattr(args, "host_bytes", 0) + getattr(args, "disk_bytes", 0)
        bounds = find_bounds(trace, result.plan, config.hash_block_size, beyond_bytes)
        print(f"\n{bounds_text(bounds)}")
        values["bounds"] = bounds_json(bounds)
    if args.json is not None:
        write_json(args.json, values)
    if args.plot is not None:
        save_figure(draw_replay(result, f"{workload_name(args)}, {args.model}"), args.plot)
    if result.recorder.refused == len(trace):
        print("kvjax replay: every request is larger than the cache, and was refused", file=sys.stderr)
        return 1
    return 0 if result.is_complete else INTERRUPTED


def _source(args: argparse.Namespace, read_as: str | None) -> dict[str, str | int | None]:
    return {"trace": args.trace, "read_as": read_as, "generate": args.generate, "seed": args.seed, "model": args.model}
