"""Arguments of tiers: host memory and a folder on disk for cached blocks that the pools have no room for.

Flow:    argparse -> [add_tier_arguments] -> [read_tiers] -> EngineConfig.tiers
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from kvjax.cli.arguments import byte_size
from kvjax.tiers.config import TierConfig

DEFAULT_DISK_BYTES = 1 << 30


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """`--host-memory`, `--disk-cache`, `--disk-memory`."""
    group.add_argument("--host-memory", type=byte_size, metavar="BYTES", help="for blocks that the cache evicts")
    group.add_argument("--disk-cache", type=Path, metavar="DIR", help="folder for them, kept from run to run")
    group.add_argument("--disk-memory", type=byte_size, metavar="BYTES", help="most bytes of the folder (1GiB)")


def read_tiers(args: argparse.Namespace, model_folder: Path) -> TierConfig | None:
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
        weights=None if args.disk_cache is None else weights_of(model_folder),
        write_through=True,
    )


def weights_of(model_folder: Path) -> str:
    """Names a checkpoint: its folder, and a digest of its files' sizes and times."""
    files = sorted(path for path in model_folder.iterdir() if path.suffix in (".json", ".safetensors"))
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{model_folder.name} {hashlib.sha256(repr(states).encode()).hexdigest()[:16]}"


__all__ = ["add_tier_arguments", "read_tiers"]
