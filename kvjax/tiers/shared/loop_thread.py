"""An event loop on a thread of its own, with a deadline for every call.

Flow:    threads of a SharedStore -> [LoopThread.run] -> coroutines of a Backend
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

GRACE_S = 1.0  # for a loop that is itself held up
T = TypeVar("T")


class LoopThread:
    """Any thread may call it, its own but to `run`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    def start(self, timeout_s: float | None, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Awaits a call, which is cancelled after `timeout_s`; the future has TimeoutError then. None: never."""
        return asyncio.run_coroutine_threadsafe(_call(timeout_s, call, *args), self._loop)

    def run(self, timeout_s: float, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Waits for what `start` starts, whatever holds the loop up.

        Raises:
            TimeoutError: it takes longer.
            Exception: what the call raises.
        """
        future = self.start(timeout_s, call, *args)
        try:
            return future.result(timeout_s + GRACE_S)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Cancels what runs, and ends the thread, which closes its loop."""
        if self._thread.is_alive() and not self._is_closing:
            self._is_closing = True
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
            if threading.current_thread() is not self._thread:  # which may have given the last reference up
                self._thread.join(GRACE_S)

    async def _cancel_all(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """What the thread does, until the loop is stopped."""
    loop.run_forever()
    loop.close()


async def _call(timeout_s: float | None, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """What is cancelled before it begins has made nothing to await."""
    async with asyncio.timeout(timeout_s):
        return await call(*args)


__all__ = ["LoopThread"]
