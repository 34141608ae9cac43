"""Arguments of an engine's tiers: host memory and a folder on disk for cached blocks that the pools have no room for.

Flow:    argparse -> [add_tier_arguments] -> [read_tiers] -> EngineConfig.tiers
"""

from __future__ import annotations

import argparse

from kvjax.cli.options.fields import add_fields, add_option, read_fields
from kvjax.tiers.config import TierConfig

NAMES = ("host_bytes", "disk_folder", "disk_bytes")
DEFAULT_DISK_BYTES = 1 << 30


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """`--host-memory`, `--disk-cache`, `--disk-memory`."""
    add_fields(group, TierConfig, "host_bytes", "disk_folder")
    add_option(group, "disk_bytes", help="most bytes of the folder (default: 1GiB)")


def read_tiers(args: argparse.Namespace) -> TierConfig | None:
    """What lies beyond the cache; None: nothing. Blocks go there as soon as they are computed.

    Raises:
        ValueError: `--disk-memory` without a folder.
    """
    given = read_fields(args, TierConfig, *NAMES)
    if "disk_folder" in given:
        given = {"disk_bytes": DEFAULT_DISK_BYTES} | given
    elif "disk_bytes" in given:
        raise ValueError("expected --disk-cache DIR with --disk-memory, got none")
    return TierConfig(**given, write_through=True) if given else None


__all__ = ["add_tier_arguments", "read_tiers"]
