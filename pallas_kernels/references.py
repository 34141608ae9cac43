"""References of a kernel by name: a NamedTuple of each kernel, with a field for everything that its call is given.

Flow:    operands by name -> [named] -> leaves for `pallas_call`; references to these -> the NamedTuple for the body

An operand is one array or shape, a NamedTuple of some (its field holds that NamedTuple of references), or None where a
launch lacks it. Fields that some launches do not name have None as their default. So the type checker knows every
reference that a body reads, and nothing else tells their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

References = TypeVar("References", bound=NamedTuple)


def named(
    kind: type[References], operands: Sequence[Mapping[str, Any]], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any]], References]]:
    """(leaves of the operands in their order, what makes references to the leaves one `kind`).

    Raises:
        ValueError: a name is given twice or is no field, or a field without a default is not given.
    """
    names = [name for some in operands for name in some]
    _check(kind, names)
    leaves, structure = jax.tree.flatten([x for some in operands for x in some.values()], is_leaf=is_leaf)

    make: Callable[..., References] = kind

    def referring(references: Sequence[Any]) -> References:
        return make(**dict(zip(names, jax.tree.unflatten(structure, references), strict=True)))

    return leaves, referring


def _check(kind: type[NamedTuple], names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind.__name__}: expected every operand once, got {', '.join(twice)} twice")
    unknown = sorted(set(names) - set(kind._fields))
    if unknown:
        raise ValueError(f"{kind.__name__}: expected operands out of its fields, got {', '.join(unknown)}")
    missing = [name for name in kind._fields if name not in names and name not in kind._field_defaults]
    if missing:
        raise ValueError(f"{kind.__name__}: expected operands for {', '.join(missing)}, got none")
