"""What a compiled module launches on the card, counted by where its source stands.

Flow:    text of a compiled module -> [launches_of] -> opcode and scope of each;  scopes: `jax.named_scope`
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Instructions that are addresses, constants or control flow; all others are kernels, or copies as dear as one.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
     "partition-id", "replica-id", "opt-barrier")
)  # fmt: skip

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")


class Launch(NamedTuple):
    """One instruction of a computation that the card runs by itself."""

    opcode: str
    scope: str  # such as "jit(call)/mixed/while/body/attend/gather"; "" where XLA made all of it


def launches_of(module: str) -> list[Launch]:
    """All launches of a module; those of a loop's body, and of all branches, once."""
    found, is_run, scopes = [], False, _last_scopes(module)
    for line in module.splitlines():
        if match := _COMPUTATION.match(line):
            is_run = bool(match[1]) or _is_called(match[2], module)
        elif is_run and (opcode := _opcode(line)) not in FREE and not opcode.endswith("-done"):
            found.append(Launch(opcode, _scope(line) or scopes.get(_called(line), "")))
    return found


def count_launches(module: str, *scopes: str) -> int:
    """Launches whose source stands in all of `scopes`."""
    return sum(all(f"/{scope}/" in launch.scope for scope in scopes) for launch in launches_of(module))


def _last_scopes(module: str) -> dict[str, str]:
    """By computation the last scope in it: XLA names none for some fusions, as those of a slice with a kernel."""
    scopes, computation = {}, ""
    for line in module.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[2]
        elif scope := _scope(line):
            scopes[computation] = scope
    return scopes


def _opcode(line: str) -> str:
    """The opcode of an instruction; a free one for other lines."""
    match = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line)
    return match[1] if match else "constant"


def _scope(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1] if name else ""


def _called(fusion: str) -> str:
    name = re.search(r"calls=%?([\w.-]+)", fusion)
    return name[1] if name else ""


def _is_called(computation: str, module: str) -> bool:
    """Whether a computation is a part of a loop or a branch; those of fusions and reductions are no launches."""
    name = rf"%?{re.escape(computation)}\b"
    called = rf"(?:body|condition|true_computation|false_computation)={name}|branch_computations=\{{[^}}]*{name}"
    return re.search(called, module) is not None
