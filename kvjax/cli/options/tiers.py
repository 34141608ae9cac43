"""Arguments of an engine's tiers: host memory, a folder on disk and a shared store for cached blocks.

Flow:    argparse -> [add_tier_arguments] -> [read_tiers] -> EngineConfig.tiers
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvjax.cli.help_text import default_text
from kvjax.cli.options.fields import add_fields, add_option, read_fields
from kvjax.tiers.config import TierConfig
from kvjax.tiers.shared.config import SharedTierConfig

NAMES = ("host_bytes", "disk_folder", "disk_bytes")
DEFAULT_DISK_BYTES = 1 << 30


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """`--host-memory`, `--disk-cache`, `--disk-memory`, `--shared-cache`, `--shared-prefix`, `--shared-secret`."""
    add_fields(group, TierConfig, "host_bytes", "disk_folder")
    add_option(group, "disk_bytes", help="Keep at most BYTES in that folder.", otherwise="1GiB")
    group.add_argument(
        "--shared-cache",
        metavar="URL",
        help="Keep blocks in a store that replicas share too, such as redis://host or s3://bucket. @FILE reads the URL "
        "from a file, which other users of the machine cannot see.",
    )
    group.add_argument(
        "--shared-prefix",
        metavar="TEXT",
        help=f"Begin all keys there with this text, one for each tenant.{default_text('kvjax')}",
    )
    group.add_argument(
        "--shared-secret", type=Path, metavar="FILE", help="Encrypt what is kept there by the secret in this file."
    )


def read_tiers(args: argparse.Namespace) -> TierConfig | None:
    """What lies beyond the cache; None: nothing. Blocks go there as soon as they are computed.

    Raises:
        ValueError: `--disk-memory` without a folder, or what is said of a shared store without one.
    """
    given: dict[str, Any] = read_fields(args, TierConfig, *NAMES)
    if "disk_folder" in given:
        given = {"disk_bytes": DEFAULT_DISK_BYTES} | given
    elif "disk_bytes" in given:
        raise ValueError("expected --disk-cache DIR with --disk-memory, got none")
    shared = read_shared(args)
    given = given if shared is None else given | {"shared": shared}
    return TierConfig(**given, write_through=True) if given else None


def read_shared(args: argparse.Namespace) -> SharedTierConfig | None:
    """The store that replicas share; None: there is none.

    Raises:
        ValueError: a prefix or a secret without a store, or as `SharedTierConfig`.
        OSError: a file cannot be read.
    """
    settings: dict[str, Any] = {}
    if args.shared_prefix is not None:
        settings["prefix"] = args.shared_prefix
    if args.shared_secret is not None:
        settings["secret"] = args.shared_secret.read_bytes().strip()
    if args.shared_cache is None:
        if settings:
            raise ValueError("expected --shared-cache URL with --shared-prefix or --shared-secret, got none")
        return None
    url = args.shared_cache
    return SharedTierConfig(store=Path(url[1:]).read_text().strip() if url.startswith("@") else url, **settings)


__all__ = ["add_tier_arguments", "read_shared", "read_tiers"]
