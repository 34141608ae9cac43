"""The plan of backends that compute nothing from a step's lengths in advance: that every sequence decodes.

Flow:    plan(is_decode=True) -> [DecodeStep] -> op(schedule=...), which then compiles to no prefill
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class DecodeStep:
    """A step of `num_tokens` tokens, of which token i is the query of sequence i."""

    num_tokens: int


def is_decode_step(op: str, schedule: Any, num_tokens: int, backend: str) -> bool:
    """Whether `schedule` says that every sequence decodes. Where "auto" fell back, another backend's says nothing.

    Raises:
        ValueError: it is of a step of another size, or of another backend than the caller names.
    """
    if schedule is None or (backend == "auto" and not isinstance(schedule, DecodeStep)):
        return False
    if schedule != DecodeStep(num_tokens):
        got = schedule if isinstance(schedule, DecodeStep) else type(schedule).__name__
        raise ValueError(f"{op}: expected schedule None or {DecodeStep(num_tokens)}, as plan() returns, got {got}")
    return True


__all__ = ["DecodeStep", "is_decode_step"]
