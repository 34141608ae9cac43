"""The ops that have cases: every package beside this one with a module `cases`, whose `CASES` are its case types."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import pallas_kernels
from pallas_kernels.cases.case import Case


def case_types() -> dict[str, type[Case]]:
    """By the name of the op."""
    found: dict[str, type[Case]] = {}
    for package in pkgutil.iter_modules(pallas_kernels.__path__, "pallas_kernels."):
        if package.ispkg and importlib.util.find_spec(f"{package.name}.cases") is not None:
            module = importlib.import_module(f"{package.name}.cases")
            found |= {case_type.op: case_type for case_type in getattr(module, "CASES", ())}
    return found
