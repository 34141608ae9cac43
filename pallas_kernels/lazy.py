"""Modules that load when they are first used: who runs on a CPU imports no compiler for GPUs.

Flow:    api of an op -> [lazy] -> a backend's module, when a call first asks for it
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    """Stands for the module of its name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """The module `name`, absolute, which the first look at one of its attributes imports."""
    return _LazyModule(name)


__all__ = ["lazy"]
