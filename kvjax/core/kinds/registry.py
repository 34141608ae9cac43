"""The classes of specs that a saved state may name. Open: a user's own kind registers itself the same way.

@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class MySpec(AttentionSpec): ...
"""

from __future__ import annotations

from typing import TypeVar

from kvjax.core.spec import KVCacheSpec

SpecClass = TypeVar("SpecClass", bound=type[KVCacheSpec])

_SPECS: dict[str, type[KVCacheSpec]] = {}


def register_kv_cache_spec(spec_class: SpecClass) -> SpecClass:
    """Class decorator: saved states and recorded calls may hold specs of the class.

    Raises:
        ValueError: another class of that name is registered.
    """
    known = _SPECS.setdefault(spec_class.__name__, spec_class)
    if known is not spec_class:
        raise ValueError(f"expected a spec class of another name than {spec_class.__name__}, which {known} has")
    return spec_class


def registered_specs() -> tuple[type[KVCacheSpec], ...]:
    """Every registered class, in the order of registration."""
    return tuple(_SPECS.values())


__all__ = ["register_kv_cache_spec", "registered_specs"]
