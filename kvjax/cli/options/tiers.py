"""Arguments of tiers: host memory and a folder on disk for cached blocks that the pools have no room for.

Flow:    argparse -> [add_tier_arguments] -> [read_tiers] -> EngineConfig.tiers
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.cli.options.types import byte_size
from kvjax.tiers.config import TierConfig

DEFAULT_DISK_BYTES = 1 << 30


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """`--host-memory`, `--disk-cache`, `--disk-memory`."""
    group.add_argument("--host-memory", type=byte_size, metavar="BYTES", help="for blocks that the cache evicts")
    group.add_argument("--disk-cache", type=Path, metavar="DIR", help="folder for them, kept from run to run")
    group.add_argument("--disk-memory", type=byte_size, metavar="BYTES", help="most bytes of the folder (1GiB)")


def read_tiers(args: argparse.Namespace) -> TierConfig | None:
    """What lies beyond the cache; None: nothing. Blocks go there as soon as they are computed.

    Raises:
        ValueError: `--disk-memory` without a folder.
    """
    if args.disk_cache is None and args.disk_memory is not None:
        raise ValueError("expected --disk-cache DIR with --disk-memory, got none")
    if args.disk_cache is None and not args.host_memory:
        return None
    return TierConfig(
        host_bytes=args.host_memory or 0,
        disk_folder=None if args.disk_cache is None else str(args.disk_cache),
        disk_bytes=None if args.disk_cache is None else args.disk_memory or DEFAULT_DISK_BYTES,
        write_through=True,
    )


__all__ = ["add_tier_arguments", "read_tiers"]
