"""Which release of vLLM is installed, and what follows from it: defaults, rules, and the look of its objects.

Flow:    installed vLLM, recorded/<release>.json -> [installed_release] -> KVCacheManager, install

A release is known if it was recorded. Nothing is guessed: another release, or an object of it that looks otherwise, is
refused by the name of what it has or lacks, unless its user takes the risk (KVJAX_ANY_RELEASE).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvjax.adapters.any_release import refuse_unless_allowed
from kvjax.adapters.vllm.description import REQUIRED, VERSIONS, Description, describe_installed, fields_of, vllm_module
from kvjax.errors import UnknownStackError

RECORDED = Path(__file__).parent / "recorded"

# What the adapter reads of a request.
REQUEST_ATTRIBUTES = (
    "all_token_ids",
    "block_hashes",
    "cache_salt",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "num_tokens",
    "prompt_embeds",
    "request_id",
    "skip_reading_prefix_cache",
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a release does that its signatures do not say; docs/vllm-differences.md has the reasons."""

    preset: str  # of `ManagerOptions.vllm`
    tells_shared_prefix: bool  # get_computed_blocks returns the length that other groups have cached, too
    counts_lookups: bool  # get_computed_blocks counts; else the scheduler does (record_prefix_cache_stats)
    shares_prefixes: bool  # get_num_common_prefix_blocks counts; else all zeros
    shards_by_group: bool = False  # specs say whether ranks of decode context parallelism share their tokens
    request_attributes: tuple[str, ...] = REQUEST_ATTRIBUTES


BASE = Rules(
    preset="0.16.0",
    tells_shared_prefix=False,
    counts_lookups=True,
    shares_prefixes=True,
)
NEWEST = Rules(
    preset="0.33.0",
    tells_shared_prefix=True,
    counts_lookups=False,
    shares_prefixes=False,
    shards_by_group=True,
    request_attributes=(*REQUEST_ATTRIBUTES, "num_in_flight_tokens", "shared_prefix_boundary"),
)
RULES = {
    "0.16": BASE,
    "0.22": replace(BASE, preset="0.22.1"),
    "0.32": replace(NEWEST, preset="0.32.0"),
    "0.33": NEWEST,
}


@dataclass(frozen=True)
class Release:
    """A known release: its name, its rules, and what was recorded of it."""

    name: str
    rules: Rules
    description: Description

    def bind(self, method: str, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call of `KVCacheManager.method`, with this release's defaults.

        Raises:
            TypeError: one is missing, comes twice or is unknown to the release.
        """
        parameters = self.description["methods"]["KVCacheManager"][method]
        if len(given) > len(parameters):
            raise TypeError(f"{method} of vllm {self.name} takes {len(parameters)} arguments, got {len(given)}")
        arguments = dict(zip(parameters, given, strict=False))
        for name, value in named.items():
            if name not in parameters or name in arguments:
                problem = "comes twice" if name in arguments else f"is no argument of vllm {self.name}'s"
                raise TypeError(f"{method}: {name!r} {problem}; expected {', '.join(parameters)}")
            arguments[name] = value
        missing = [name for name, value in parameters.items() if value == REQUIRED and name not in arguments]
        if missing:
            raise TypeError(f"{method} of vllm {self.name} lacks the argument {missing[0]!r}")
        return {name: arguments.get(name, value) for name, value in parameters.items()}

    def check_fields(self, value: Any) -> None:
        """Checks that a config or spec has the fields of this release's class of its name, no fewer and no more.

        Raises:
            UnknownStackError: it has not; the message names the class or the field.
        """
        name = type(value).__name__
        recorded = self.description["fields"].get(name)
        if recorded is None:
            raise UnknownStackError(f"vllm {self.name} has no class {name} in what kvjax.adapters.vllm knows of it")
        found = fields_of(type(value))
        if found != recorded:
            check_names(f"{name} of vllm {self.name}", recorded, found)

    def check_request(self, request: Any) -> None:
        """Checks that a request has what the adapter reads.

        Raises:
            UnknownStackError: it lacks an attribute, which the message names.
        """
        for name in self.rules.request_attributes:
            if not hasattr(request, name):
                raise UnknownStackError(
                    f"{type(request).__name__} of vllm {self.name} lacks {name!r}, which kvjax.adapters.vllm reads"
                )


def check_names(what: str, expected: Sequence[str], found: Sequence[str]) -> None:
    """Checks that two lists have the same names.

    Raises:
        UnknownStackError: they have not; the message names the first that is missing, else the first that is new.
    """
    for name in expected:
        if name not in found:
            raise UnknownStackError(f"{what} lacks {name!r}, which kvjax.adapters.vllm expects")
    for name in found:
        if name not in expected:
            raise UnknownStackError(f"{what} has {name!r}, which kvjax.adapters.vllm does not know")


def recorded_release(name: str) -> Release:
    """A release that was recorded.

    Raises:
        UnknownStackError: it was not.
    """
    if name not in RULES:
        raise UnknownStackError(f"vllm {name} is not known to kvjax.adapters.vllm, which knows {VERSIONS}")
    return Release(name, RULES[name], json.loads((RECORDED / f"{name}.json").read_text()))


def check_description(recorded: Description, found: Description) -> None:
    """Checks that an installed vLLM has the methods, parameters, fields and attributes of a recorded one.

    Raises:
        UnknownStackError: it has not; the message names the first difference.
    """
    version = found["version"]
    for cls, methods in recorded["methods"].items():
        check_names(f"vllm {version}: {cls}", list(methods), list(found["methods"][cls]))
        for method, parameters in methods.items():
            other = found["methods"][cls][method]
            where = f"vllm {version}: {cls}.{method}"
            check_names(where, list(parameters or ()), list(other or ()))
            for name, value in (parameters or {}).items():
                if other[name] != value:
                    raise UnknownStackError(f"{where}: expected the default {name}={value!r}, got {other[name]!r}")
    for kind in ("fields", "events"):
        check_names(f"vllm {version}", list(recorded[kind]), list(found[kind]))
        for cls, names in recorded[kind].items():
            check_names(f"vllm {version}: {cls}", names, found[kind][cls])
    for name in REQUEST_ATTRIBUTES:
        if name not in found["request"]:
            raise UnknownStackError(f"vllm {version}: Request lacks {name!r}, which kvjax.adapters.vllm reads")


def nearest_release(name: str) -> str:
    """The newest recorded release that is no newer than `name`, else the oldest."""

    def order(of: str) -> list[int]:
        return [int(part) if part.isdecimal() else 0 for part in of.split(".")]

    known = sorted(RULES, key=order)
    return max((other for other in known if order(other) <= order(name)), key=order, default=known[0])


@cache
def installed_release() -> Release:
    """The release that is installed, once it was compared with its record.

    Returns:
        The recorded release; with KVJAX_ANY_RELEASE=1 one that differs, under the rules of the nearest recorded one.

    Raises:
        MissingStackError: vLLM is not installed.
        UnknownStackError: its version is unknown, or it differs from what was recorded; the message names how.
    """
    version = vllm_module("vllm").__version__
    name = ".".join(version.split(".")[:2])
    found = describe_installed()
    nearest = recorded_release(nearest_release(name))
    try:
        check_description(nearest.description, found)
        return recorded_release(name)
    except UnknownStackError as error:
        refuse_unless_allowed(str(error))
    return Release(name, nearest.rules, found)


__all__ = ["RULES", "Release", "Rules", "check_description", "installed_release", "recorded_release"]
