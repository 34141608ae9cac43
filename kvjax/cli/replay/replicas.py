"""`kvjax replay` over several replicas behind routers, mixed or with prefill and decode apart.

Flow:    arguments -> [wants_replicas, run_replicas] -> run_fleet, run_split -> text, JSON
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvjax.cli.help_text import default_text
from kvjax.cli.options.fields import add_fields, flag_of, read_fields
from kvjax.cli.options.replay import config_of, tiers_of
from kvjax.cli.options.types import positive_int
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import write_json
from kvjax.cli.running.progress import progress
from kvjax.errors import ConfigError
from kvjax.replay import (
    ReplayConfig,
    ReplayTierConfig,
    SplitConfig,
    TraceRequest,
    TransferConfig,
    fleet_json,
    fleet_text,
    run_fleet,
    run_split,
    split_json,
    split_text,
)
from kvjax.routing import ROUTERS

DEFAULT_ROUTER = "prefix"
NEEDS_REPLICAS = ("router", "shares_disk")
NEEDS_SPLIT = ("bytes_per_s", "latency_s")
OF_ONE_REPLICA = ("serial", "plot", "record", "miss_reasons", "bound", "compare_defaults")


def add_replica_arguments(group: argparse._ArgumentGroup) -> None:
    """How many replicas, what each does, and what is between them."""
    group.add_argument("--replicas", type=positive_int, metavar="N", help="Run N replicas, each with a cache.")
    group.add_argument(
        "--prefill-replicas",
        type=positive_int,
        metavar="P",
        help="Let P replicas compute prompts and first tokens, beside --decode-replicas. P + D replicas that do both "
        "are shown too.",
    )
    group.add_argument(
        "--decode-replicas", type=positive_int, metavar="D", help="Let D replicas make the tokens after the first."
    )
    group.add_argument(
        "--router",
        choices=ROUTERS,
        action="append",
        help="Send requests to replicas by this router. Without --prefill-replicas it may be given several times, and "
        f"each is replayed.{default_text(DEFAULT_ROUTER)}",
    )
    add_fields(group, ReplayTierConfig, "shares_disk")
    add_fields(group, TransferConfig)


def wants_replicas(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for several replicas, or for one behind a router.

    Raises:
        ConfigError: arguments that contradict one another.
    """
    is_split = args.prefill_replicas is not None or args.decode_replicas is not None
    if is_split and (args.prefill_replicas is None or args.decode_replicas is None):
        given = "--prefill-replicas" if args.decode_replicas is None else "--decode-replicas"
        raise ConfigError(f"expected --prefill-replicas P and --decode-replicas D, got {given} alone")
    if is_split and args.replicas is not None:
        raise ConfigError("expected --replicas N, or --prefill-replicas P and --decode-replicas D, got both")
    if is_split and args.router is not None and len(args.router) > 1:
        raise ConfigError(f"expected one --router with --prefill-replicas, got {len(args.router)}")
    if not is_split and (given := first_given(args, NEEDS_SPLIT)):
        raise ConfigError(f"expected --prefill-replicas P and --decode-replicas D with {given}, got neither")
    wants = is_split or args.replicas is not None
    if not wants and (given := first_given(args, NEEDS_REPLICAS)):
        raise ConfigError(f"expected --replicas N, or --prefill-replicas P and --decode-replicas D, with {given}")
    if wants and (given := first_given(args, OF_ONE_REPLICA)):
        raise ConfigError(f"expected {given} for one replica, got it with several; leave one out")
    return wants


def shared_tiers_of(args: argparse.Namespace) -> ReplayTierConfig | None:
    """What lies beyond the caches of several replicas.

    Raises:
        ConfigError: a disk that is shared, and has no size.
    """
    tiers = tiers_of(args)
    if "shares_disk" not in args:
        return tiers
    if tiers is None or not tiers.disk_bytes:
        raise ConfigError("expected --disk-memory BYTES with --shared-disk, got none")
    return replace(tiers, shares_disk=True)


def run_replicas(args: argparse.Namespace, trace: Sequence[TraceRequest], source: dict[str, Any]) -> int:
    """Replays and prints, or what there is of it when an interrupt comes; 0, or that it came.

    `source` says in the JSON file where the trace is from.

    Raises:
        ConfigError: a bad model, or a shared disk without a size.
        MemoryBudgetError: the cache holds no request.
    """
    config = replace(config_of(args), tiers=shared_tiers_of(args))
    routers = list(dict.fromkeys(args.router or [DEFAULT_ROUTER]))
    if args.prefill_replicas is None:
        text, values = _run_mixed(args, trace, config, routers)
    else:
        text, values = _run_split(args, trace, config, *routers)
    print(text)
    if args.json is not None:
        write_json(args.json, source | values)
    return INTERRUPTED if values["interrupted"] else 0


def _run_mixed(
    args: argparse.Namespace, trace: Sequence[TraceRequest], config: ReplayConfig, routers: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Text and values of one router, or of several side by side."""
    results = []
    with (
        interruptible() as should_stop,
        progress("Replaying", len(trace) * len(routers), "request", enabled=not args.no_progress) as advance,
    ):
        for router in routers:
            results.append(run_fleet(trace, config, args.replicas, router, advance, should_stop))
            if should_stop():
                break
    values = [fleet_json(result) for result in results]
    if len(routers) == 1:
        return fleet_text(results), values[0]
    is_interrupted = len(results) < len(routers) or not results[-1].is_complete
    return fleet_text(results), {"interrupted": is_interrupted, "routers": values}


def _run_split(
    args: argparse.Namespace, trace: Sequence[TraceRequest], config: ReplayConfig, router: str
) -> tuple[str, dict[str, Any]]:
    split = SplitConfig(
        args.prefill_replicas, args.decode_replicas, TransferConfig(**read_fields(args, TransferConfig))
    )
    num_replicas = split.num_prefill + split.num_decode
    with (
        interruptible() as should_stop,
        progress("Replaying", 2 * len(trace), "request", enabled=not args.no_progress) as advance,
    ):
        apart = run_split(trace, config, split, router, advance, should_stop)
        mixed = run_fleet(trace, config, num_replicas, router, advance, should_stop)
    return split_text(apart, mixed), split_json(apart, mixed)


def first_given(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The first option of these that is given, as it is written; empty: none."""
    given = (name for name in names if getattr(args, name, None) is not None and getattr(args, name) is not False)
    return next(map(flag_of, given), "")
