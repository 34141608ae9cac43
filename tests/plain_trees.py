"""Trees of dicts and lists, as JSON and CBOR give them, for tests that change a value somewhere in one."""

from __future__ import annotations

from typing import Any


def places_of(plain: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a tree."""
    found, containers = [], [plain]
    for one in containers:
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found += [(one, key) for key in keys]
        containers += [one[key] for key in keys if isinstance(one[key], dict | list)]
    return found
