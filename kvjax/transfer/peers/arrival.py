"""Entries on their way to this process.

Flow:    PageClient.pull -> [Arrival] -> SentRequest -> PageWriter.write
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from kvjax.errors import TransferError
from kvjax.transfer.peers.ticket import Ticket
from kvjax.transfer.sent_request import SentRequest


class Arrival:
    """One pull. Any thread may call."""

    def __init__(self, ticket: Ticket, future: Future[SentRequest], cancel: Callable[[], None]) -> None:
        """A pull that a thread is at; `cancel` breaks it off."""
        self._ticket, self._future, self._cancel = ticket, future, cancel

    @classmethod
    def failed(cls, ticket: Ticket, error: Exception) -> Arrival:
        """A pull that could not be begun."""
        future: Future[SentRequest] = Future()
        future.set_exception(error)
        return cls(ticket, future, lambda: None)

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._future.done()

    def wait(self, timeout_s: float = 60.0) -> SentRequest:
        """The entries, once all are here.

        Raises:
            TransferError: a peer died, did not answer in time, or has no such offer. Nothing was written.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            self.cancel()
            cause: Exception | str = f"no answer in {timeout_s} s"
        except CancelledError:
            cause = "the pull was cancelled"
        except Exception as error:  # of whatever kind: the caller computes the tokens
            cause = error
        header = self._ticket.header
        message = f"tokens {header.first} to {header.stop} did not arrive: {cause}; compute them here"
        raise TransferError(message) from (cause if isinstance(cause, Exception) else None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls back once `is_ready`, on any thread."""
        self._future.add_done_callback(lambda _: callback())

    def cancel(self) -> None:
        """Breaks the pull off; `wait` raises."""
        if not self._future.cancel():
            self._cancel()


__all__ = ["Arrival"]
