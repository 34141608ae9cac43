"""Whether two jaxprs are the same function but for the names of variables.

Flow:    two pieces of a step -> [equal_jaxprs] -> one program for both

What cannot be compared is different: constants that are other arrays, parameters without an equality of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


def equal_jaxprs(ours: Jaxpr, theirs: Jaxpr) -> bool:
    """Whether both compute the same of the same inputs; costs a look at each equation."""
    return ours is theirs or _Renaming().equal(ours, theirs)


class _Renaming:
    """Variables of one jaxpr under their names in another."""

    def __init__(self) -> None:
        self._names: dict[Var, Var] = {}

    def equal(self, ours: Jaxpr, theirs: Jaxpr) -> bool:
        return (
            _equal_values(getattr(ours, "consts", ()), getattr(theirs, "consts", ()))
            and len(ours.eqns) == len(theirs.eqns)
            and self._bind(ours.constvars, theirs.constvars)
            and self._bind(ours.invars, theirs.invars)
            and all(map(self._equal_equations, ours.eqns, theirs.eqns))
            and self._equal_atoms(ours.outvars, theirs.outvars)
        )

    def _equal_equations(self, ours: JaxprEqn, theirs: JaxprEqn) -> bool:
        return (
            ours.primitive is theirs.primitive
            and self._equal_atoms(ours.invars, theirs.invars)
            and ours.ctx is theirs.ctx
            and _equal_values(ours.params, theirs.params)
            and self._bind(ours.outvars, theirs.outvars)
        )

    def _bind(self, ours: Sequence[Var], theirs: Sequence[Var]) -> bool:
        """Makes these variables of both the same, if their shapes are."""
        if len(ours) != len(theirs) or any(a.aval != b.aval for a, b in zip(ours, theirs, strict=True)):
            return False
        self._names.update(zip(ours, theirs, strict=True))
        return True

    def _equal_atoms(self, ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
        return len(ours) == len(theirs) and all(map(self._equal_atom, ours, theirs))

    def _equal_atom(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Literal) or isinstance(theirs, Literal):
            return type(ours) is type(theirs) and ours.aval == theirs.aval and _equal_bits(ours.val, theirs.val)
        return self._names.get(ours) is theirs


def _equal_bits(ours: Any, theirs: Any) -> bool:
    """Whether two numbers of one dtype have equal bits."""
    return np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def _equal_values(ours: Any, theirs: Any) -> bool:
    """Whether two parameters, or trees of them, are equal."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs) or isinstance(ours, np.ndarray | jax.Array):
        return False
    if isinstance(ours, ClosedJaxpr | Jaxpr):
        return _equal_values(getattr(ours, "consts", ()), getattr(theirs, "consts", ())) and equal_jaxprs(
            getattr(ours, "jaxpr", ours), getattr(theirs, "jaxpr", theirs)
        )
    if isinstance(ours, Mapping):
        return ours.keys() == theirs.keys() and all(_equal_values(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(_equal_values, ours, theirs))
    return bool(ours == theirs)


__all__ = ["equal_jaxprs"]
