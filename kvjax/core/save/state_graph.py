"""A tree of objects as plain data: what snapshot and restore of a manager are built on.

Flow:    KVCacheManager -> [encode_graph] -> nodes (numbers, text, bytes, lists) -> CBOR -> state_filling.py

Every attribute of every object is state, so that whatever a kind or a policy adds is saved without a word here. It has
to be kept in numbers, text, bytes, arrays, lists, tuples, dicts, sets, deques or objects with such attributes. Arrays
must be whole: two views of one array would come back as two arrays. Three exceptions:

    kept      functions, classes, and instances of `KEPT_CLASSES`, which the constructor was given: the fresh tree has
              its own at the same place
    observed  an attribute that holds one of `OBSERVER_CLASSES`: the fresh tree's is left as it is
    made      instances that a fresh tree does not have: only of `MADE_CLASSES`. A file makes no other, and calls no
              constructor and no function: what it says is data.

A value is None, a bool, a number, text, bytes, or `[i]`, node i. Node 0 is the root; a node is one of

    ["object", class name, {attribute: value}]       ["value", class name, {attribute: value}]  a frozen dataclass
    ["list" | "tuple" | "set" | "frozenset", [value, ...]]      ["dict" | "OrderedDict", [key, value, key, value, ...]]
    ["deque", maximal length, [value, ...]]
    ["array", dtype, shape, bytes, writeable]        ["objects", shape, [value, ...]]  an array of Python objects
    ["rows", tables, longest row foreseen, columns, value of `lengths`, bytes]  a `RowTable`: only what rows own
    ["kept", class name]

An object met twice is one node, and one object again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.hashing.cbor_encoding import CborEncoding
from kvjax.core.hashing.extra_keys import ExtraKeys, LoRARequest, MultiModalFeature
from kvjax.core.hashing.pickle_encoding import PickleEncoding
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.pool.cache_tier import TierLink
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.core.tables.row_table import RowTable
from kvjax.core.watch.evicted_blocks import EvictedBlocks
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector, PoolResidency

KEPT_CLASSES: tuple[type, ...] = (KVCacheConfig, KVCacheSpec, ManagerOptions, MappingProxyType)
OBSERVER_CLASSES: tuple[type, ...] = (EvictedBlocks, KVCacheMetricsCollector, MissReasons, PoolResidency, TierLink)
MADE_CLASSES: tuple[type, ...] = (
    AllBlocksCleared,
    BlockHasher,
    BlockOrigin,
    BlockRemoved,
    BlockStored,
    CborEncoding,
    ExtraKeys,
    LoRARequest,
    MultiModalFeature,
    PickleEncoding,
    Request,
)
FOREIGN_MODULES = (
    "builtins",
    "collections",
    "functools",
    "itertools",
    "numpy",
    "types",
)  # no attributes tell their state
INLINE = (bool, int, float, str, bytes)
Node = list[Any]


def attributes_of(instance: Any) -> dict[str, Any]:
    """All attributes of an object by name, in order of names: of its dict and of the slots of its classes."""
    found = dict(getattr(instance, "__dict__", {}))
    for cls in type(instance).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
                found[name] = getattr(instance, name)
    return dict(sorted(found.items()))


def encode_graph(root: Any) -> list[Node]:
    """The nodes of everything that can be reached from `root`.

    Raises:
        NotImplementedError: something is of a class that has no form here.
    """
    return _Encoder(root).nodes()


class _Encoder:
    """Numbers objects in the order in which they are met, nearest to the root first."""

    def __init__(self, root: Any) -> None:
        self._found: list[Any] = [root]  # keeps them alive, so that ids stay theirs
        self._number_of = {id(root): 0}

    def nodes(self) -> list[Node]:
        """All of them."""
        nodes: list[Node] = []
        while len(nodes) < len(self._found):
            nodes.append(self._node(self._found[len(nodes)]))
        return nodes

    def _value(self, value: Any) -> Any:
        if value is None or type(value) in INLINE:
            return value
        if isinstance(value, OBSERVER_CLASSES):
            return None
        if isinstance(value, np.generic):
            return value.item()
        number = self._number_of.setdefault(id(value), len(self._found))
        if number == len(self._found):
            self._found.append(value)
        return [number]

    def _values(self, values: Any) -> list[Any]:
        return [self._value(value) for value in values]

    def _node(self, value: Any) -> Node:
        cls = type(value)
        if isinstance(value, KEPT_CLASSES) or _is_code(value):
            return ["kept", cls.__name__]
        if cls is list or cls is tuple:
            return [cls.__name__, self._values(value)]
        if cls is set or cls is frozenset:
            return [cls.__name__, self._values(sorted(value))]
        if cls is dict or cls is OrderedDict:
            return [cls.__name__, self._values(part for item in value.items() for part in item)]
        if cls is deque:
            return ["deque", value.maxlen, self._values(value)]
        if cls is np.ndarray:
            return self._array(value)
        if cls is RowTable:
            lengths, owned = self._value(value.lengths), value.owned().tobytes()
            return ["rows", value.num_tables, value.max_columns, value.num_columns, lengths, owned]
        if cls.__module__.split(".")[0] in FOREIGN_MODULES or isinstance(value, Enum):
            raise NotImplementedError(
                f"a {cls.__name__} can not be saved: expected state in arrays, lists, tuples, dicts, sets, deques and "
                f"objects of them, got {value!r}"
            )
        kind = "value" if _is_frozen(cls) else "object"
        return [kind, cls.__name__, {name: self._value(part) for name, part in attributes_of(value).items()}]

    def _array(self, array: np.ndarray) -> Node:
        if isinstance(array.base, np.ndarray) and id(array.base) in self._number_of:
            raise NotImplementedError(f"a view of {array.dtype}{list(array.shape)} can not be saved beside its array")
        if array.dtype == np.object_:
            return ["objects", list(array.shape), self._values(array.ravel().tolist())]
        return ["array", array.dtype.str, list(array.shape), array.tobytes(), bool(array.flags.writeable)]


def _is_frozen(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _is_code(value: Any) -> bool:
    """A class or a function; a bound method, which holds state, is none."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, type | FunctionType)
