"""How kinds are built: no class overrides what another has filled in, and each is either abstract or final."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from kvjax.core import KVCacheSpec, SingleTypeKVCacheManager, registered_specs
from kvjax.core.kinds.encoder_columns import EncoderManager
from kvjax.core.kinds.positional import PositionalManager
from kvjax.core.kinds.recurrent import RecurrentManager
from tests.core.kinds.examples import EXAMPLES

MANAGERS = [EncoderManager, PositionalManager, RecurrentManager]


def defined(cls: type) -> dict[str, Any]:
    """Methods and properties of a class's own body."""
    kinds = (property, classmethod, staticmethod)
    return {name: value for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, kinds)}


def concrete_overrides(cls: type) -> Iterator[str]:
    """`Class.name` of what a class defines although a base has filled it in."""
    for base in cls.__mro__[1:]:
        if base is not object:
            filled_in = [name for name, value in defined(base).items() if not _is_abstract(value)]
            yield from (f"{cls.__name__}.{name} over {base.__name__}" for name in defined(cls) if name in filled_in)


def _is_abstract(value: Any) -> bool:
    return getattr(value, "__isabstractmethod__", False)


def test_managers_of_all_kinds_are_examined() -> None:
    ours = {spec_class for spec_class in registered_specs() if spec_class.__module__.startswith("kvjax.")}
    assert ours <= {type(spec) for spec in EXAMPLES.values()}


@pytest.mark.parametrize("manager_class", MANAGERS)
def test_no_manager_overrides_a_concrete_method(manager_class: type[SingleTypeKVCacheManager]) -> None:
    assert [name for cls in manager_class.__mro__ for name in concrete_overrides(cls)] == []


@pytest.mark.parametrize("manager_class", MANAGERS)
def test_a_manager_is_final_and_its_bases_are_abstract(manager_class: type[SingleTypeKVCacheManager]) -> None:
    if manager_class.__module__.startswith("kvjax."):
        assert getattr(manager_class, "__final__", False)
    bases = [cls for cls in manager_class.__mro__[1:] if issubclass(cls, SingleTypeKVCacheManager)]
    assert all(inspect.isabstract(base) for base in bases)


def test_the_law_finds_an_override() -> None:
    class Base:
        def kept(self) -> None: ...

    class Leaf(Base):
        def kept(self) -> None: ...

    assert list(concrete_overrides(Leaf)) == ["Leaf.kept over Base"]


@pytest.mark.parametrize("spec_class", sorted({type(spec) for spec in EXAMPLES.values()}, key=lambda cls: cls.__name__))
def test_no_spec_overrides_a_concrete_method(spec_class: type[KVCacheSpec]) -> None:
    """But dataclasses: what they generate, and `__post_init__`, which goes on to its base's."""
    overrides = [name for cls in spec_class.__mro__ for name in concrete_overrides(cls)]
    assert [name for name in overrides if "__" not in name] == []
    assert all(inspect.isabstract(base) for base in spec_class.__mro__[1:] if issubclass(base, KVCacheSpec))
