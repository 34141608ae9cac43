"""Marks between the layers of a traced step: where its program may be cut.

Flow:    pages at the end of a layer -> [mark_pages] -> the same pages, an equation of the jaxpr -> `cut_step`

A mark computes nothing: lowered, it is its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

mark_p = Primitive("kvjax_layer_mark")
mark_p.multiple_results = True
mark_p.def_impl(lambda *arrays: list(arrays))
mark_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(mark_p, lambda _, *values: list(values))


def mark_pages(arrays: Sequence[jax.Array]) -> list[Any]:
    """`arrays`, all page arrays of the step, behind a mark."""
    return mark_p.bind(*arrays)  # type: ignore[no-any-return, no-untyped-call]


__all__ = ["mark_p", "mark_pages"]
