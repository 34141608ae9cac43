"""What a stack's classes and functions look like where an adapter touches them: recorded, compared, loaded on use.

Flow:    scripts/record_signatures.py -> recorded/<stack>/<version>.json -> [Stack.load] -> the object, or an error

An object is recorded as the names of its fields, its parameters, or its methods' parameters, each in order:

    {"module": "a.b", "fields": [...]} | {"module": "a.b", "parameters": [...]} | {"module": "a.b", "methods": {...}}
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvjax.adapters.any_release import refuse_unless_allowed
from kvjax.adapters.stack import require_stack
from kvjax.errors import UnknownStackError

RECORDED = Path(__file__).parent / "recorded"

Description = dict[str, Any]


@cache
def recorded(stack: str) -> tuple[Description, ...]:
    """Each `recorded/<stack>/<version>.json`: "package", "version", and "objects" by name."""
    return tuple(json.loads(path.read_text()) for path in sorted((RECORDED / stack).glob("*.json")))


@dataclass(frozen=True)
class Stack:
    """A serving stack whose objects an adapter makes or takes."""

    name: str  # of the folder of its recorded versions

    @property
    def package(self) -> str:
        """Name under which the stack is installed."""
        return str(recorded(self.name)[0]["package"])

    @property
    def versions(self) -> str:
        """The versions that were recorded."""
        return " or ".join(version["version"] for version in recorded(self.name))

    def load(self, name: str) -> Any:
        """The stack's object called `name`, which looks as in one of the recorded versions.

        Raises:
            MissingStackError: the stack cannot be imported; the line names the package and the versions.
            UnknownStackError: the object is another version's; the message names what it lacks or has in addition.
        """
        wanted = next(v["objects"][name] for v in recorded(self.name) if name in v["objects"])
        module = require_stack(wanted["module"], self.package, self.versions)
        found: Any = module
        for part in name.split("."):  # of a method: its class first
            found = getattr(found, part, None)
        self.check(name, found)
        return found

    def check(self, name: str, found: Any) -> None:
        """That `found` looks as the object called `name` in one of the recorded versions.

        Raises:
            UnknownStackError: as `load`; the message compares with the version that is nearest. KVJAX_ANY_RELEASE=1
                makes a warning of it where `found` is there.
        """
        lines = []
        for version in recorded(self.name):
            if name in version["objects"]:
                wanted = version["objects"][name]
                got = {} if found is None else describe(found, wanted)
                lines.append((differences(name, wanted, got), version["version"]))
        nearest, version = min(lines, key=lambda of_version: len(of_version[0]))
        if found is None or nearest:
            told = f"it lacks {name!r}" if found is None else "; ".join(nearest)
            difference = f"expected {self.package} {version}, got another version: {told}"
            if found is None:
                raise UnknownStackError(difference)
            refuse_unless_allowed(difference)


def describe(found: Any, wanted: Description) -> Description:
    """`found` in the form of `wanted`."""
    if "fields" in wanted:
        if dataclasses.is_dataclass(found):
            return {"fields": [field.name for field in dataclasses.fields(found)]}
        return {"fields": list(getattr(found, "_fields", ()) or getattr(found, "__annotations__", ()))}
    if "parameters" in wanted:
        return {"parameters": parameters_of(found)}
    generated = {"__init__"} if dataclasses.is_dataclass(found) and "__init__" not in wanted["methods"] else set()
    methods = {
        name: parameters_of(value)
        for name, value in vars(found).items()
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")) and name not in generated
    }
    return {"methods": methods}


def parameters_of(function: Any) -> list[str]:
    """Names of the parameters but `self`, in order; `*` and `**` ones with their stars."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in parameters if p.name != "self"]


def differences(name: str, wanted: Description, found: Description) -> list[str]:
    """A line for each field, parameter or method that `found` lacks, has in addition or has in another place."""
    for kind in ("fields", "parameters"):
        if kind in wanted:
            return _of_names(name, kind[:-1], wanted[kind], found.get(kind, []))
    lines = _of_names(name, "method", sorted(wanted["methods"]), sorted(found.get("methods", {})))
    for method, parameters in wanted["methods"].items():
        if method in found.get("methods", {}):
            lines += _of_names(f"{name}.{method}", "parameter", parameters, found["methods"][method])
    return lines


def _of_names(name: str, kind: str, wanted: list[str], found: list[str]) -> list[str]:
    lines = [f"{name} lacks the {kind} {one!r}" for one in wanted if one not in found]
    lines += [f"{name} has a new {kind} {one!r}" for one in found if one not in wanted]
    if not lines and wanted != found:
        place = next(i for i, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1])
        lines.append(f"{name} has the {kind} {found[place]!r} in place {place}, expected {wanted[place]!r}")
    return lines
