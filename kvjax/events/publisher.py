"""Who takes the KV events of each step.

Flow:    KVCacheManager.take_events -> [EventPublisher.publish] -> routers (Dynamo, llm-d)
Source:  vLLM 0.33 distributed/kv_events.py (EventPublisher)
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType

from kvjax.core.watch.kv_events import KVCacheEvent


class EventPublisher(abc.ABC):
    """Takes batches of events in order. A context manager that shuts itself down."""

    @abc.abstractmethod
    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Tells the events of one step, oldest first. No events, no batch.

        Raises:
            RuntimeError: the publisher is shut down.
        """

    @abc.abstractmethod
    def shutdown(self, timeout_s: float = 1.0) -> None:
        """Sends what waits, for at most that long, and ends its thread and sockets. A second call does nothing."""

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


class NullEventPublisher(EventPublisher):
    """Drops all events."""

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Nothing."""

    def shutdown(self, timeout_s: float = 1.0) -> None:
        """Nothing."""
