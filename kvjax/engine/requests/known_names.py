"""Names that a caller gave, checked against those that there are.

Flow:    keyword arguments, keys of mappings -> [check_names] -> nothing, or ValueError with the nearest name
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for the first of the `given` names of `what` that is none of the `known`."""
    names = tuple(known)
    for name in given:
        if name not in names:
            nearest = get_close_matches(str(name), names, n=1, cutoff=0.65)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
            raise ValueError(f"expected {what} by a known name, got {name!r}; {hint}")


__all__ = ["check_names"]
