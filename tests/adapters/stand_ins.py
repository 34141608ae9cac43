"""Modules that hold, of a recorded version of a stack, classes with its fields and methods and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

from kvjax.adapters.signatures import Description, recorded


def stand_in(name: str, wanted: Description) -> Any:
    """A class or function that looks as `wanted`; a class keeps what it was made from in `given`."""
    if "fields" in wanted:
        return dataclasses.make_dataclass(name, [(field, Any, None) for field in wanted["fields"]])
    if "parameters" in wanted:
        return _function(wanted["parameters"])
    return type(name, (), {method: _function(["self", *names]) for method, names in wanted["methods"].items()})


def _function(names: list[str]) -> Callable[..., Any]:
    kinds = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(n.lstrip("*"), kinds.get(n[: n.count("*")], plain)) for n in names]
    )

    def called(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if names[:1] == ["self"]:
            args[0].given = given

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


@contextmanager
def stack_with(
    stack: str, version: int = 0, change: Callable[[Description], None] | None = None
) -> Iterator[dict[str, Any]]:
    """The recorded version number `version` of `stack`, with `change` made to its objects, under its modules' names."""
    objects = {name: dict(wanted) for name, wanted in recorded(stack)[version]["objects"].items()}
    for wanted in objects.values():
        for kind in ("fields", "parameters"):
            if kind in wanted:
                wanted[kind] = list(wanted[kind])
        if "methods" in wanted:
            wanted["methods"] = {name: list(names) for name, names in wanted["methods"].items()}
    if change is not None:
        change(objects)
    made = {name: stand_in(name, wanted) for name, wanted in objects.items()}
    kept = dict(sys.modules)
    try:
        for name, wanted in objects.items():
            parts = wanted["module"].split(".")
            for end in range(1, len(parts) + 1):
                full = ".".join(parts[:end])
                if not isinstance(sys.modules.get(full), StandInModule):
                    sys.modules[full] = StandInModule(full)
            owner: Any = sys.modules[wanted["module"]]
            *classes, last = name.split(".")
            for part in classes:
                if not hasattr(owner, part):
                    setattr(owner, part, type(part, (), {}))
                owner = getattr(owner, part)
            setattr(owner, last, made[name])
        yield made
    finally:
        for name in [n for n in sys.modules if n not in kept]:
            del sys.modules[name]
        sys.modules.update(kept)


class StandInModule(ModuleType):
    """A module of a stack that is not there."""

    __path__: ClassVar[list[str]] = []
