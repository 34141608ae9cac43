"""Imports of a serving stack, on use, with one line for whoever lacks it or has another version.

Flow:    an adapter in use -> [require_stack] -> the stack's module, or MissingStackError
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kvjax.errors import MissingStackError


def require_stack(module: str, package: str, versions: str) -> ModuleType:
    """The imported `module` of `package`.

    Raises:
        MissingStackError: it can not be imported; the message names the package and the versions that do.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingStackError(
            f"kvjax.adapters.{package} needs {package} {versions}; importing {module} failed: {error}"
        ) from error
