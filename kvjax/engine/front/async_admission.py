"""Room for requests: callers of any event loop wait for it, the most urgent first, and equals in order.

Flow:    AsyncLLMEngine.generate -> [Admission.enter] -> engine's thread -> [Admission.leave] when a request has ended
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvjax.errors import EngineClosedError


@dataclass(order=True)
class _Caller:
    """Who waits. Its future is touched in its own event loop only."""

    priority: int
    number: int
    num_requests: int = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)
    future: asyncio.Future[None] = field(compare=False)
    has_left: bool = field(default=False, compare=False)
    has_room: bool = field(default=False, compare=False)


class Admission:
    """Places of at most `max_requests` requests, until it is closed for good.

    `enter` belongs to event loops, the rest to any thread.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._num_free = max_requests
        self._callers: list[_Caller] = []  # a heap
        self._numbers = itertools.count()
        self._error: EngineClosedError | None = None
        self._lock = threading.Lock()

    @property
    def num_requests(self) -> int:
        """Requests that have a place."""
        return max(self.max_requests - self._num_free, 0)

    @property
    def num_callers(self) -> int:
        """Callers that wait."""
        with self._lock:
            return sum(not caller.has_left for caller in self._callers)

    async def enter(self, num_requests: int, priority: int) -> None:
        """Waits until there are places for so many requests, and takes them. Cancelled, it has taken none.

        Raises:
            ValueError: there are fewer places in all.
            EngineClosedError: the engine was stopped.
        """
        if num_requests > self.max_requests:
            raise ValueError(f"expected at most {self.max_requests} samples (max_requests), got {num_requests}")
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._error is not None:
                raise EngineClosedError(str(self._error))
            if not self._callers and num_requests <= self._num_free:
                self._num_free -= num_requests
                return
            caller = _Caller(priority, next(self._numbers), num_requests, loop, loop.create_future())
            heapq.heappush(self._callers, caller)
            self._let_in()
        try:
            await caller.future
        except BaseException:
            with self._lock:
                caller.has_left = True
                if caller.has_room:
                    self._num_free += num_requests
                self._let_in()
            raise

    def leave(self, num_requests: int = 1) -> None:
        """So many requests have ended."""
        with self._lock:
            self._num_free += num_requests
            self._let_in()

    def close(self, message: str) -> None:
        """Nobody may enter from here on; callers that wait get an EngineClosedError."""
        with self._lock:
            self._error = EngineClosedError(message)
            callers, self._callers = self._callers, []
        for caller in callers:
            _call(caller, lambda future: future.set_exception(EngineClosedError(message)))

    def free(self) -> None:
        """No request has a place: the engine has none. It is closed, and those on their way may still leave."""
        with self._lock:
            self._num_free = self.max_requests

    def _let_in(self) -> None:
        """Gives places to the callers at the head. The lock is held."""
        while self._callers and (self._callers[0].has_left or self._callers[0].num_requests <= self._num_free):
            caller = heapq.heappop(self._callers)
            if caller.has_left:
                continue
            self._num_free -= caller.num_requests
            caller.has_room = True
            if not _call(caller, lambda future: future.set_result(None)):
                self._num_free += caller.num_requests


def _call(caller: _Caller, settle: Callable[[asyncio.Future[None]], None]) -> bool:
    """Settles a caller's future in its event loop; False: that loop is closed, and nobody waits."""

    def in_loop() -> None:
        if not caller.future.done():
            settle(caller.future)

    try:
        caller.loop.call_soon_threadsafe(in_loop)
    except RuntimeError:
        return False
    return True


__all__ = ["Admission"]
