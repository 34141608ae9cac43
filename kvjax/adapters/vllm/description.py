"""What an installed vLLM looks like where the adapter touches it: parameters, fields and attributes, as plain values.

Flow:    vLLM's modules -> [describe_installed] -> recorded/<release>.json (scripts/vllm_signatures.py), drift test
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from kvjax.adapters.stack import require_stack

REQUIRED = "(required)"
VERSIONS = "0.16, 0.22, 0.32 or 0.33"

Description = dict[str, Any]


def vllm_module(name: str) -> Any:
    """vLLM's module `name`, imported.

    Raises:
        MissingStackError: vLLM is not installed.
    """
    return require_stack(name, "vllm", VERSIONS)


def parameters_of(function: Any) -> dict[str, Any]:
    """Names and defaults of a function's parameters but `self`, in order."""
    parameters = list(inspect.signature(function).parameters.values())
    return {
        p.name: REQUIRED if p.default is p.empty else _plain(p.default)
        for p in parameters
        if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def fields_of(cls: type) -> list[str]:
    """Names of a dataclass's or a struct's fields, in order."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "__struct_fields__", ()))


def describe_installed() -> Description:
    """The vLLM that is installed.

    Raises:
        MissingStackError: none is.
    """
    manager = vllm_module("vllm.v1.core.kv_cache_manager")
    interface = vllm_module("vllm.v1.kv_cache_interface")
    events = vllm_module("vllm.distributed.kv_events")
    request = vllm_module("vllm.v1.request").Request
    specs = {
        name: cls
        for name, cls in sorted(vars(interface).items())
        if inspect.isclass(cls) and issubclass(cls, interface.KVCacheSpec) and cls is not interface.KVCacheSpec
    }
    described = specs | {name: getattr(interface, name) for name in ("KVCacheGroupSpec", "KVCacheConfig")}
    return {
        "version": vllm_module("vllm").__version__,
        "methods": {cls.__name__: _methods_of(cls) for cls in (manager.KVCacheManager, manager.KVCacheBlocks)},
        "fields": {name: fields_of(cls) for name, cls in described.items()},
        "events": {name: fields_of(getattr(events, name)) for name in ("BlockStored", "BlockRemoved")},
        "request": sorted(_attributes_of(request)),
    }


def _methods_of(cls: type) -> dict[str, dict[str, Any] | None]:
    """Parameters by method; None: a property."""
    methods: dict[str, dict[str, Any] | None] = {}
    for name, value in vars(cls).items():
        if (name == "__init__" and not dataclasses.is_dataclass(cls)) or (
            not name.startswith("_") and inspect.isfunction(value)
        ):
            methods[name] = parameters_of(value)
        elif not name.startswith("_") and isinstance(value, property):
            methods[name] = None
    return methods


def _attributes_of(cls: type) -> set[str]:
    """What `__init__` assigns to `self`, and the class's properties."""
    source = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))  # type: ignore[misc]
    assigned = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not node.attr.startswith("_")
    }
    return assigned | {name for name, value in vars(cls).items() if isinstance(value, property)}


def _plain(value: Any) -> Any:
    """A default as JSON keeps it."""
    return list(value) if isinstance(value, tuple) else value


__all__ = ["REQUIRED", "VERSIONS", "Description", "describe_installed", "fields_of", "parameters_of", "vllm_module"]
