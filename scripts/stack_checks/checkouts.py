"""Modules of a stack taken from a checkout or an unpacked wheel, without running its packages' `__init__`.

Flow:    path, module name -> [module_of] -> the module

A stack's packages import engines, devices and other stacks; the modules with reference attention need next to none of
it. `_STANDS_IN` has the few names that they take from elsewhere.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def module_of(root: Path, name: str, stands_in: tuple[str, ...] = ()) -> Any:
    """Module `name` from `root`; modules of `stands_in` are stand-ins that take any call."""
    for full in stands_in:
        sys.modules.setdefault(full, MagicMock(name=full))
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [str(root.joinpath(*parts[:end]))]
            sys.modules[package] = module
    return importlib.import_module(name)


def function_of(path: Path, name: str, namespace: dict[str, Any]) -> Any:
    """The function or method `name` of a source file alone, over the names that its module would give it."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name == name]
    if not nodes:
        raise SystemExit(f"{path} has no function {name}")
    nodes[0].decorator_list = []
    module = ast.Module(body=[nodes[0]], type_ignores=[])
    flags = __future__.annotations.compiler_flag  # its annotations are not evaluated
    found = dict(namespace)
    exec(compile(module, str(path), "exec", flags=flags, dont_inherit=True), found)
    return found[name]
