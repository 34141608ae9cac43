"""`--rules vllm-0.33.0`: the exact rules of a release of vLLM, in place of options that decide one by one.

Flow:    --rules -> [add_rules_argument, release_of] -> ReplayConfig.release, EngineConfig.release
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

from kvjax.cli.options.fields import flag_of
from kvjax.core.options.release_rules import RELEASES
from kvjax.errors import ConfigError

PREFIX = "vllm-"


def add_rules_argument(group: argparse._ActionsContainer, instead_of: Collection[str]) -> None:
    """What a release caches and evicts, instead of options that stand for fields of these names."""
    group.add_argument(
        "--rules",
        choices=[PREFIX + release for release in RELEASES],
        help=f"Cache and evict as this release of vLLM does, in place of {', '.join(map(flag_of, instead_of))}.",
    )


def release_of(args: argparse.Namespace, instead_of: Collection[str]) -> str | None:
    """The release that is named. Options of the names have no default, so that one that is given is known.

    Raises:
        ConfigError: one of them is given too.
    """
    given = next((name for name in instead_of if name in args), None)
    if args.rules is not None and given is not None:
        raise ConfigError(f"expected --rules {args.rules} or {flag_of(given)}, got both: rules decide that too")
    return None if args.rules is None else args.rules.removeprefix(PREFIX)


__all__ = ["add_rules_argument", "release_of"]
