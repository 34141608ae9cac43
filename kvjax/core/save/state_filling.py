"""A tree of objects brought into the state that another one of the same make was saved in.

Flow:    nodes (state_graph.py), a fresh manager -> [fill_graph] -> the fresh manager in the saved state

    1  pair    each node with what the fresh tree has at its place, nearest to the root first
    2  make    objects that the fresh tree lacks, empty; values that cannot be filled later, with their parts
    3  fill    every object with its parts
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.core.save.state_graph import MADE_CLASSES, OBSERVER_CLASSES, Node, attributes_of
from kvjax.core.tables.row_table import RowTable

MISSING = object()
EMPTY: dict[str, Any] = {"list": list, "dict": dict, "OrderedDict": OrderedDict, "set": set}


def fill_graph(root: Any, nodes: list[Node]) -> None:
    """Brings the objects below `root`, a fresh tree of the same make, into the saved state.

    Raises:
        ValueError: the nodes are those of a tree of another make, or damaged. The tree is then of no use.
    """
    decoder = _Decoder(root, nodes)
    for number in range(len(nodes)):
        decoder.fill(number)


class _Decoder:
    """Pairs nodes with the objects of the fresh tree, then makes what is missing, then fills in."""

    def __init__(self, root: Any, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._fresh: dict[int, Any] = {0: root}  # by node, what the fresh tree has at its place
        self._made: dict[int, Any] = {}  # by node, what it became
        self._in_use: set[int] = set()  # ids of the fresh tree's objects that have a node
        for number in range(len(nodes)):
            self._pair(number)
        for number in range(len(nodes)):
            self._make(number)

    def _pair(self, number: int) -> None:
        """Finds the fresh counterparts of a node's parts; nodes stand behind the first one that names them."""
        fresh, node = self._fresh.get(number, MISSING), self._nodes[number]
        if fresh is MISSING:
            return
        if node[0] in ("object", "value"):
            for name, value in node[2].items():
                self._note(value, getattr(fresh, name, MISSING))
        elif node[0] in ("list", "tuple") and isinstance(fresh, list | tuple):
            for value, part in zip(node[1], fresh, strict=False):
                self._note(value, part)
        elif node[0] in ("dict", "OrderedDict") and isinstance(fresh, dict):
            for key, value in _pairs(node[1]):
                if not isinstance(key, list):
                    self._note(value, fresh.get(key, MISSING))

    def _note(self, value: Any, fresh: Any) -> None:
        if isinstance(value, list) and fresh is not MISSING and fresh is not None:
            self._fresh.setdefault(value[0], fresh)

    def _make(self, number: int) -> Any:
        """The node's object, empty if it can be filled later. What can not waits for its parts."""
        if number in self._made:
            return self._made[number]
        node = self._nodes[number]
        kind = node[0]
        if kind == "object":
            made = self._object(number)
        elif kind in EMPTY:
            made = EMPTY[kind]()
        elif kind == "deque":
            made = deque(maxlen=node[1])
        elif kind == "array":
            made = _array_of(*node[1:])
        elif kind == "rows":
            made = self._rows(*node[1:])
        elif kind == "objects":
            if math.prod(node[1]) != len(node[2]):
                raise ValueError(f"expected {math.prod(node[1])} objects of an array, got {len(node[2])}")
            made = np.empty(node[1], np.object_)
        elif kind == "kept":
            made = self._kept(number)
        elif kind in ("tuple", "frozenset"):
            parts = [self._value(value) for value in node[1]]
            made = tuple(parts) if kind == "tuple" else frozenset(parts)
        elif kind == "value":
            made = self._frozen(number)
        else:
            raise ValueError(f"expected a node of a known kind, got {kind!r}")
        self._made[number] = made
        return made

    def _value(self, value: Any) -> Any:
        return self._make(value[0]) if isinstance(value, list) else value

    def _object(self, number: int) -> Any:
        """The fresh tree's own object if it has one of this class at this place, else a new one."""
        _, name, parts = self._nodes[number]
        fresh = self._fresh.get(number, MISSING)
        if type(fresh).__name__ != name:
            return _new_instance(name, parts)
        if set(parts) != set(attributes_of(fresh)):
            differing = sorted(set(parts) ^ set(attributes_of(fresh)))
            raise ValueError(f"expected the state of a {name} of this version, got one that differs in {differing}")
        if id(fresh) in self._in_use:
            return _blank(type(fresh))
        self._in_use.add(id(fresh))
        return fresh

    def _rows(self, num_tables: int, max_columns: int | None, num_columns: int, lengths: Any, owned: bytes) -> RowTable:
        return RowTable.restored(
            num_tables, max_columns, num_columns, self._value(lengths), np.frombuffer(owned, np.int32)
        )

    def _frozen(self, number: int) -> Any:
        _, name, parts = self._nodes[number]
        fresh = self._fresh.get(number, MISSING)
        same = type(fresh).__name__ == name and set(parts) == set(attributes_of(fresh))
        made = _blank(type(fresh)) if same else _new_instance(name, parts)
        for attribute, value in parts.items():
            object.__setattr__(made, attribute, self._value(value))
        return made

    def _kept(self, number: int) -> Any:
        fresh, name = self._fresh.get(number, MISSING), self._nodes[number][1]
        if type(fresh).__name__ != name:
            raise ValueError(f"expected a {name} in the new manager where the saved one had it, got none")
        return fresh

    def fill(self, number: int) -> None:
        """Puts the parts into the node's object."""
        node, made = self._nodes[number], self._made[number]
        kind = node[0]
        if kind == "object":
            for attribute, value in node[2].items():
                if not isinstance(getattr(made, attribute, None), OBSERVER_CLASSES):
                    object.__setattr__(made, attribute, self._value(value))
        elif kind == "list":
            made.extend(map(self._value, node[1]))
        elif kind in ("dict", "OrderedDict"):
            made.update((self._value(key), self._value(value)) for key, value in _pairs(node[1]))
        elif kind == "set":
            made.update(map(self._value, node[1]))
        elif kind == "deque":
            made.extend(map(self._value, node[2]))
        elif kind == "objects":
            flat = made.reshape(-1)
            for i, value in enumerate(node[2]):
                flat[i] = self._value(value)


def _pairs(parts: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _array_of(dtype: str, shape: list[int], data: bytes, writeable: bool) -> np.ndarray:
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    array.flags.writeable = writeable
    return array


def _new_instance(name: str, parts: dict[str, Any]) -> Any:
    """An empty instance of one of `MADE_CLASSES`."""
    cls = next((cls for cls in MADE_CLASSES if cls.__name__ == name), None)
    if cls is None:
        raise ValueError(f"expected state that this manager can hold, got a {name} where it has none")
    expected = set(getattr(cls, "__slots__", ())) | {
        field.name for field in getattr(cls, "__dataclass_fields__", {}).values()
    }
    if set(parts) != expected:
        differing = sorted(set(parts) ^ expected)
        raise ValueError(f"expected the state of a {name} of this version, got one that differs in {differing}")
    return _blank(cls)


def _blank(cls: Any) -> Any:
    """An instance without attributes."""
    return cls.__new__(cls)
