"""The lock that the processes of one machine share over a folder, and the count of bytes that it guards.

Flow:    DiskStore -> [FolderLock.held] -> the open lock file -> [read_counter, write_counter]

The file holds the count and its complement, so damage shows. A process that dies lets the lock go.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvjax.errors import TierDataError

COUNTER = struct.Struct("<qq")  # bytes, and the same with every bit turned
LONGEST_PAUSE_S = 0.01  # between two tries


class FolderLock:
    """Of one opened folder. Any thread may take it, one at a time."""

    def __init__(self, path: Path) -> None:
        """A lock on the file at `path`, which is made when it is first taken."""
        self._path = path
        self._guard = threading.Lock()  # flock does not keep threads of one process apart

    @contextmanager
    def held(self, wait_s: float) -> Iterator[int]:
        """The open file, until the block ends. Other threads are waited for, and another process at most `wait_s`.

        Raises:
            TierDataError: another process held it all the time.
            OSError: the file cannot be opened.
        """
        deadline_s = time.monotonic() + wait_s  # from here on: several threads wait together, not in turn
        with self._guard:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._take(file, wait_s, deadline_s)
                yield file
            finally:
                os.close(file)  # unlocks

    def _take(self, file: int, wait_s: float, deadline_s: float) -> None:
        pause_s = 0.0001
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise TierDataError(
                        f"another process holds the lock {self._path}, waited {wait_s:g} s; end it if it hangs"
                    ) from None
            else:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def read_counter(file: int) -> int | None:
    """Bytes as counted; None: the count is damaged, or was never written."""
    data = os.pread(file, COUNTER.size, 0)
    if len(data) < COUNTER.size:
        return None
    count, complement = COUNTER.unpack(data)
    return count if count == ~complement and count >= 0 else None


def write_counter(file: int, num_bytes: int) -> None:
    """Counts anew."""
    os.pwrite(file, COUNTER.pack(num_bytes, ~num_bytes), 0)


__all__ = ["FolderLock", "read_counter", "write_counter"]
