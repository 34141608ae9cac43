"""Imports of optional dependencies."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvjax.errors import MissingExtraError


def require_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """The imported `module`.

    Raises:
        MissingExtraError: it is not installed; the message says what needs it and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".", maxsplit=1)[0]
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: pip install 'kvjax[{extra}]'"
        ) from error
