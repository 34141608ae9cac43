"""Values of the core cannot change: whoever is handed one may keep it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import kvjax.core
from kvjax.core.spec import KVCacheSpec

COUNTERS = {"PrefixCacheStats"}  # counts up until it is taken
OF_ONE_CALL = {"PrefixLookup", "SlotCounts"}  # inside one call, which a frozen one's constructor would slow down


def classes_of_the_core() -> set[type]:
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(kvjax.core.__path__, "kvjax.core.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {cls for cls in classes if cls.__module__.startswith("kvjax.core")}


def test_dataclasses_are_frozen() -> None:
    values = [cls for cls in classes_of_the_core() if dataclasses.is_dataclass(cls)]
    assert len(values) > 30
    frozen = {cls.__name__ for cls in values if cls.__dataclass_params__.frozen}  # type: ignore[attr-defined]
    assert {cls.__name__ for cls in values} - frozen == COUNTERS | OF_ONE_CALL


def test_the_fields_of_a_spec_are_given_by_name() -> None:
    """A field that is added may stand anywhere."""
    specs = [cls for cls in classes_of_the_core() if issubclass(cls, KVCacheSpec)]
    assert len(specs) > 9
    for spec in specs:
        kinds = {parameter.kind for parameter in inspect.signature(spec).parameters.values()}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY}, spec
