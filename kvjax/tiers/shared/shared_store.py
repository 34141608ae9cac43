"""Units on a store that replicas share: what is asked, read and written there, and when it is left alone.

Flow:    TierScheduler -> [SharedStore.may_have]; TierWorker -> [SharedStore.offer, read] -> Backend, on a loop thread
Source:  why it waits for nobody: docs/tiers.md, "Shared"

    ask      the scheduler asks for units that it knows nothing of; a lookup is on its way, and its request waits for it
             until `lookup_timeout_s`
    read     a reader thread fetches units; what is not proved to be what was written is a miss, and is deleted there
    write    a writer thread sends what the store lacks; beyond `max_bytes_in_flight` units are not sent

Each way has a `Breaker`. While that of reading is open nothing is there, while that of writing is nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvjax.errors import TierDataError
from kvjax.tiers.shared.backend import told
from kvjax.tiers.shared.breaker import Breaker
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.encrypted_seals import EncryptedSeals
from kvjax.tiers.shared.loop_thread import LoopThread
from kvjax.tiers.shared.open_backend import open_backend
from kvjax.tiers.shared.presence import Answer, Presence
from kvjax.tiers.shared.seals import PlainSeals, Seals
from kvjax.tiers.stats import TierStats
from kvjax.tiers.units import UnitKey

logger = logging.getLogger("kvjax.tiers")
LOOKUP_UNITS = 512  # of one call
CALL_BYTES = 1 << 23  # written by one call
PROBE = "probe"  # a name below the prefix, of no unit
T = TypeVar("T")


class SharedStore:
    """One engine's side. `close` ends its threads; any thread may call it, and only `read` and `flush` wait."""

    def __init__(self, config: SharedTierConfig, identity: Mapping[str, str], stats: TierStats | None = None) -> None:
        """Begins to ask whether the store works, and does not wait for the answer.

        Args:
            config: which store, and how.
            identity: what the units are of. Those of another identity are never found.
            stats: where reads and writes are counted.

        Raises:
            ValueError, MissingExtraError: as `open_backend`.
        """
        self.stats = TierStats() if stats is None else stats
        tell = partial(_tell_problem, weakref.ref(self))
        self.reading = Breaker(f"reading from the shared tier {config.place}", tell)
        self.writing = Breaker(f"writing to the shared tier {config.place}", tell)
        self._config = config
        self._identity = dict(identity)
        self._seals = self._seals_of(self._identity)
        self._presence = Presence(config.lookup_timeout_s)
        self._backend = open_backend(config)
        self.readers = ThreadPoolExecutor(config.num_threads, "kvjax-shared-read")
        self._writers = ThreadPoolExecutor(config.num_threads, "kvjax-shared-write")
        self._guard = threading.Lock()
        self._bytes_in_flight = 0
        self._writes: deque[Future[None]] = deque()
        self._lookups: deque[Future[list[bool]]] = deque()
        self._loop = LoopThread("kvjax-shared")
        self._ended = weakref.finalize(self, LoopThread.close, self._loop)
        self._loop.start(None, _watch, weakref.ref(self), config.retry_s)

    # -- what the scheduler asks ------------------------------------------------------------------------------------

    def may_have(self, keys: Sequence[UnitKey]) -> list[bool]:
        """Which units may be there: those that are, and those that are being asked for, as the others are from now."""
        if self.reading.is_open:
            return [False] * len(keys)
        answers = self._presence.of(keys)
        unknown = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.UNKNOWN]
        for first in range(0, len(unknown), LOOKUP_UNITS):
            self._ask(unknown[first : first + LOOKUP_UNITS])
        return [answer is not Answer.ABSENT for answer in answers]

    def is_asked(self, keys: Sequence[UnitKey]) -> bool:
        """Whether an answer that is on its way, and not late, decides about one of these units."""
        return not self.reading.is_open and Answer.ASKED in self._presence.of(keys)

    @property
    def lookups(self) -> list[Future[list[bool]]]:
        """Lookups that are on their way."""
        while self._lookups and self._lookups[0].done():
            self._lookups.popleft()
        return [lookup for lookup in self._lookups if not lookup.done()]

    @property
    def lookup_timeout_s(self) -> float:
        """How long a request waits for a lookup."""
        return self._config.lookup_timeout_s

    # -- units up and down ------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[UnitKey], num_bytes: int) -> list[np.ndarray]:  # uint8[num_bytes] each
        """The bytes of units; waits at most `timeout_s` for the store.

        Raises:
            TierDataError: one is not there, or not what was written, or the store does not work.
        """
        if self.reading.is_open:
            raise TierDataError(f"the shared tier {self._config.place} does not work at present")
        seals = self._seals
        names = list(map(seals.name_of, keys))
        try:
            values = self._call(self._backend.get, names)
            units = list(zip(keys, values, strict=True))
        except Exception as error:
            self._note_failure(self.reading, error)
            raise TierDataError(f"the shared tier {self._config.place} gave no units: {told(error)}") from error
        self.reading.succeed()
        gone = [key for key, value in units if value is None]
        opened, problem = [], ""
        for key, value in units:
            try:
                if value is not None:
                    opened.append(seals.open(key, value, num_bytes))
            except TierDataError as error:
                gone.append(key)
                problem = f"{seals.name_of(key)}: {error}"
                self._drop(key, problem)
        if gone:
            self._presence.tell(gone, [False] * len(gone))
            raise TierDataError(problem or f"{len(gone)} of {len(keys)} units are in the shared tier no more")
        self._count("num_shared_reads", len(keys))
        return opened

    def offer(
        self,
        keys: Sequence[UnitKey],
        pages: Sequence[np.ndarray],  # uint8[len(keys), n] each
        *,
        waits: bool = False,  # for room; else units are passed over
    ) -> bool:
        """Has a thread write units, a row of all pages each, unless the store has them; False: they are passed over.

        Nobody changes the pages afterwards.
        """
        num_bytes = sum(page.nbytes for page in pages)
        if waits and self._bytes_in_flight + num_bytes > self._config.max_bytes_in_flight:
            self.flush()
        with self._guard:
            is_taken = not self.writing.is_open and (
                not self._bytes_in_flight or self._bytes_in_flight + num_bytes <= self._config.max_bytes_in_flight
            )
            if not is_taken:
                self.stats.num_shared_skips += len(keys)
                return False
            self._bytes_in_flight += num_bytes
        write = self._writers.submit(self._write, list(keys), list(pages))
        write.add_done_callback(partial(self._end_write, num_bytes))
        self._writes.append(write)
        return True

    def flush(self) -> None:
        """Waits until all that was offered is there, or has failed."""
        wait_for_futures(list(self._writes))

    def use_weights(self, digest: str) -> None:
        """Units are of weights with this digest from here on. Nothing is on its way."""
        self._seals = self._seals_of({**self._identity, "weights in use": digest})
        self._presence = Presence(self._config.lookup_timeout_s)

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        self.readers.shutdown()
        self._writers.shutdown()
        try:
            self._call(self._backend.close)
        except Exception as error:
            logger.debug("closing the shared tier %s: %s", self._config.place, error)
        self._ended()

    # -- lookups ----------------------------------------------------------------------------------------------------

    def _ask(self, keys: list[UnitKey]) -> None:
        presence, seals = self._presence, self._seals
        presence.ask(keys)
        self._count("num_shared_lookups", 1)
        names = list(map(seals.name_of, keys))
        lookup = self._loop.start(self._config.timeout_s, self._backend.have, names)
        lookup.add_done_callback(partial(self._end_lookup, presence, keys, time.monotonic()))
        self._lookups.append(lookup)

    def _end_lookup(
        self, presence: Presence, keys: list[UnitKey], started_s: float, lookup: Future[list[bool]]
    ) -> None:
        seconds = time.monotonic() - started_s
        try:
            found = list(map(bool, lookup.result()))
            presence.tell(keys, found)
        except BaseException as error:  # a cancelled one too
            presence.tell(keys, [False] * len(keys))
            self._note_failure(self.reading, error)
            return
        if seconds > self._config.lookup_timeout_s:
            self._note_failure(self.reading, f"a lookup took {seconds:.2f} s")
        else:
            self.reading.succeed()

    # -- writes -----------------------------------------------------------------------------------------------------

    def _write(self, keys: list[UnitKey], pages: list[np.ndarray]) -> None:
        """By a thread: sends the units that the store lacks."""
        presence, seals = self._presence, self._seals
        answers = presence.of(keys)
        rows = [i for i, answer in enumerate(answers) if answer is not Answer.THERE]
        asked = [i for i in rows if answers[i] is not Answer.ABSENT]
        num_left = len(rows)
        try:
            if asked and not self.writing.is_open:
                found = self._call(self._backend.have, [seals.name_of(keys[i]) for i in asked])
                there = {i for i, is_there in zip(asked, found, strict=True) if is_there}
                presence.tell([keys[i] for i in there], [True] * len(there))
                rows = [i for i in rows if i not in there]
                num_left = len(rows)
            at_once = max(CALL_BYTES // max(sum(page[0].nbytes for page in pages), 1), 1)
            for first in range(0, len(rows), at_once):
                if self.writing.is_open:
                    break
                part = [keys[i] for i in rows[first : first + at_once]]
                items = [
                    (seals.name_of(keys[i]), seals.close(keys[i], [page[i] for page in pages]))
                    for i in rows[first : first + at_once]
                ]
                self._call(self._backend.put, items)
                self.writing.succeed()
                presence.tell(part, [True] * len(part))
                num_left -= len(part)
                self._count("num_shared_writes", len(part))
        except Exception as error:
            self._note_failure(self.writing, error)
        self._count("num_shared_skips", num_left)

    def _call(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Waits for a call to the backend; TimeoutError after `timeout_s`."""
        return self._loop.run(self._config.timeout_s, call, *args)

    def _end_write(self, num_bytes: int, _: Future[None]) -> None:
        with self._guard:
            self._bytes_in_flight -= num_bytes
        while self._writes and self._writes[0].done():
            self._writes.popleft()

    # -- faults -----------------------------------------------------------------------------------------------------

    def _drop(self, key: UnitKey, problem: str) -> None:
        """Deletes what is no unit, so that whoever computes it writes it anew."""
        self._count("num_shared_errors", 1)
        count = self.stats.num_shared_errors
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...
            logger.error("the shared tier %s has damaged units, %d so far: %s", self._config.place, count, problem)
        self._loop.start(self._config.timeout_s, self._backend.delete, [self._seals.name_of(key)])

    def _note_failure(self, breaker: Breaker, problem: object) -> None:
        self._count("num_shared_failures", 1)
        breaker.fail(told(problem))

    def _count(self, name: str, count: int) -> None:
        with self._guard:
            setattr(self.stats, name, getattr(self.stats, name) + count)

    async def _probe(self, *, is_first: bool) -> None:
        """Asks whether the store works: for what was found broken, or at the start for both ways."""
        config, name = self._config, f"{self._config.prefix}/{PROBE}"
        if is_first or self.reading.is_open:
            timeout_s = config.timeout_s if is_first else config.lookup_timeout_s  # the first one connects
            await self._try(self.reading, timeout_s, is_first, self._backend.have, [name])
        if is_first or self.writing.is_open:
            await self._try(self.writing, config.timeout_s, is_first, self._backend.put, [(name, b"kvjax")])

    async def _try(
        self, breaker: Breaker, timeout_s: float, is_first: bool, call: Callable[..., Awaitable[Any]], argument: Any
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await call(argument)
        except Exception as error:
            if is_first:
                breaker.fail(told(error), is_first=True)
        else:
            breaker.succeed()

    def _seals_of(self, identity: Mapping[str, str]) -> Seals:
        secret = self._config.secret_bytes
        if secret:
            return EncryptedSeals(self._config.prefix, identity, secret)
        return PlainSeals(self._config.prefix, identity)


def _tell_problem(of: weakref.ReferenceType[SharedStore]) -> None:
    """Writes into the statistics what does not work now."""
    store = of()
    if store is not None:
        store.stats.shared_problem = store.reading.problem or store.writing.problem


async def _watch(of: weakref.ReferenceType[SharedStore], retry_s: float) -> None:
    """Probes as long as there is a store to probe for."""
    is_first = True
    while (store := of()) is not None:
        await store._probe(is_first=is_first)
        del store
        is_first = False
        await asyncio.sleep(retry_s)


__all__ = ["SharedStore"]
