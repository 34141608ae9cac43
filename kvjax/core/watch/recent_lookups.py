"""What lookups found of requests that are not admitted yet, so that each counts once, when it is.

Flow:    lookup of a waiting request -> [RecentLookups] -> admission -> PrefixCacheStats, MissReasons
"""

from __future__ import annotations

from typing import Generic, TypeVar

Found = TypeVar("Found")


class RecentLookups(Generic[Found]):
    """The latest lookup of each of the `most` requests that were looked up last; the others were given up."""

    def __init__(self, most: int = 4_096) -> None:
        self._most = most
        self._found: dict[str, Found] = {}  # by request, latest last

    def note(self, request_id: str, found: Found) -> None:
        """A request was looked up."""
        self._found.pop(request_id, None)
        self._found[request_id] = found
        if len(self._found) > self._most:
            del self._found[next(iter(self._found))]

    def take(self, request_id: str) -> Found | None:
        """What its latest lookup found, once; None: it was not looked up."""
        return self._found.pop(request_id, None)


__all__ = ["RecentLookups"]
