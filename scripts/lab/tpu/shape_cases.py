"""Every case that `tpu_compile_all.py` compiles: the ops over the model shapes that their packages list.

Flow:    case types of the ops + shards -> [shape_cases] -> ShapeCase -> compile_one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scripts.lab.compiled import compiled_types, shape_settings

MAX_SHARDS = 8


@dataclass(frozen=True)
class ShapeCase:
    """One compilation, whatever the chip."""

    op: str
    label: str  # the first shape that asks for it, and its shards
    settings: tuple[str, ...]


def shape_cases(ops: Iterable[str] | None = None, extra: tuple[str, ...] = ()) -> list[ShapeCase]:
    """The cases of `ops` (None: all) in order, those of equal settings once; `extra` settings go to every case."""
    found: dict[tuple[str, tuple[str, ...]], ShapeCase] = {}
    for op in compiled_types("tpu") if ops is None else ops:
        for label, settings in _of_op(op):
            case = ShapeCase(op, label, (*settings, *extra))
            found.setdefault((op, case.settings), case)
    return list(found.values())


def subset(cases: list[ShapeCase], chips: tuple[str, ...], per_op: int = 4) -> list[tuple[str, ShapeCase]]:
    """(chip, case): of each op up to `per_op` cases, spread over its shapes and shards, and over the chips in turn."""
    picked = []
    for op in dict.fromkeys(case.op for case in cases):
        own = [case for case in cases if case.op == op]
        places = [i * (len(own) - 1) // max(per_op - 1, 1) for i in range(per_op)]
        picked += [(chips[i % len(chips)], own[place]) for i, place in enumerate(places)]
    return picked


def _of_op(op: str) -> Iterator[tuple[str, list[str]]]:
    case_type = compiled_types("tpu")[op]
    for num_shards in range(1, MAX_SHARDS + 1):
        for label, settings in shape_settings(case_type, num_shards):
            yield f"{label} / {num_shards}", settings
