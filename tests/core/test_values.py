"""Values of the core cannot change: whoever is handed one may keep it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import kvjax.core

COUNTERS = {"PrefixCacheStats"}  # counts up until it is taken


def test_dataclasses_are_frozen() -> None:
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(kvjax.core.__path__, "kvjax.core.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    values = [cls for cls in classes if dataclasses.is_dataclass(cls) and cls.__module__.startswith("kvjax.core")]
    assert len(values) > 30
    assert {cls.__name__ for cls in values if not cls.__dataclass_params__.frozen} == COUNTERS  # type: ignore[attr-defined]
