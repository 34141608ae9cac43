"""Which manager serves which spec. Open: a user's own kind registers itself the same way.

    @register_kv_cache_manager(MySpec)
    class MyManager(SingleTypeKVCacheManager): ...

A spec class without an entry of its own is served by the manager of its nearest base class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.spec import KVCacheSpec

ManagerClass = TypeVar("ManagerClass", bound=type[SingleTypeKVCacheManager])

_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {}


def register_kv_cache_manager(spec_class: type[KVCacheSpec]) -> Callable[[ManagerClass], ManagerClass]:
    """Class decorator: the class manages groups of `spec_class`.

    Raises:
        ValueError: the spec has a manager already.
    """

    def register(manager_class: ManagerClass) -> ManagerClass:
        known = _MANAGERS.setdefault(spec_class, manager_class)
        if known is not manager_class:
            raise ValueError(f"{spec_class.__name__} is managed by {known.__name__}; derive a spec class of its own")
        return manager_class

    return register


def registered_specs() -> tuple[type[KVCacheSpec], ...]:
    """Every spec class with a manager of its own, in the order of registration."""
    return tuple(_MANAGERS)


def manager_class_of(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The class that manages groups of `spec`.

    Raises:
        ValueError: no manager is registered for the spec's class or a base of it.
    """
    for spec_class in type(spec).__mro__:
        if spec_class in _MANAGERS:
            return _MANAGERS[spec_class]
    known = ", ".join(sorted(spec_class.__name__ for spec_class in _MANAGERS))
    raise ValueError(f"no manager for {type(spec).__name__}; known: {known}. Register one: register_kv_cache_manager")
