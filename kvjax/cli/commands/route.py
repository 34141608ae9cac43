"""`kvjax route`: a trace over several replicas, hit rate, first-token times and balance of each router.

Flow:    arguments -> [run] -> kvjax.replay.run_fleet, once a router -> text, JSON
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from kvjax.cli.options.replay import (
    add_cache_arguments,
    add_speed_arguments,
    add_tier_arguments,
    add_workload_arguments,
    config_of,
    trace_of,
)
from kvjax.cli.options.types import positive_int
from kvjax.cli.replay.replicas import add_shared_disk_argument, shared_tiers_of
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import output_file
from kvjax.cli.running.progress import progress
from kvjax.replay import fleet_json, fleet_text, run_fleet
from kvjax.routing import ROUTERS

DEFAULT_REPLICAS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax route`."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="request lines, Azure's or BurstGPT's CSV, conversations, prompts or agents' sessions, also gzipped",
    )
    parser.add_argument(
        "--replicas",
        type=positive_int,
        default=DEFAULT_REPLICAS,
        metavar="N",
        help=f"each with a cache of its own (default: {DEFAULT_REPLICAS})",
    )
    parser.add_argument(
        "--router", choices=ROUTERS, action="append", help="may be given more than once (default: all of them)"
    )
    add_workload_arguments(parser.add_argument_group("workload"))
    add_cache_arguments(parser.add_argument_group("cache of a replica"))
    tiers = parser.add_argument_group("tiers beyond the cache of a replica")
    add_tier_arguments(tiers)
    add_shared_disk_argument(tiers)
    add_speed_arguments(parser.add_argument_group("speed of a replica"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    output.add_argument("--no-progress", action="store_true", help="no progress bar (there is none off a terminal)")


def run(args: argparse.Namespace) -> int:
    """Replays once a router and prints the results, or what there is when an interrupt comes; 0, or that it came.

    Raises:
        TraceError: a trace of an unknown form, or a bad line of it.
        ConfigError: neither or both of a trace and --generate, a shared disk without a size, or a bad model.
        MemoryBudgetError: the cache does not hold the longest request.
    """
    (trace, _), config = trace_of(args), replace(config_of(args), tiers=shared_tiers_of(args))
    routers = list(dict.fromkeys(args.router or ROUTERS))
    results = []
    with (
        interruptible() as should_stop,
        progress("Routing", len(trace) * len(routers), "request", enabled=not args.no_progress) as advance,
    ):
        for router in routers:
            if not should_stop():
                results.append(run_fleet(trace, config, args.replicas, router, advance, should_stop))
    print(fleet_text(results))
    if args.json is not None:
        args.json.write_text(json.dumps([fleet_json(result) for result in results], indent=2) + "\n", encoding="utf-8")
    return 0 if len(results) == len(routers) and all(result.is_complete for result in results) else INTERRUPTED
