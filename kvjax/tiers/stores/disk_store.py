"""Units on disk: a file each, named by its key, shared by the processes of one machine.

Flow:    TierWorker's threads -> [DiskStore] -> files; TierScheduler.holds -> [DiskStore.has]
Source:  why files, and not a key-value library: docs/tiers.md, "Disk"

    <folder>/STORE.json                what the files are units of: layout, hashes, weights; of another, nothing opens
    <folder>/.lock                     bytes of all units, written under flock (folder_lock.py)
    <folder>/versions/<name>           which weights a version names, a file each
    <folder>/units/ab/<key>            a unit: a header with checksum and key, and its bytes
    <folder>/tmp/<pid>-<number>        a unit that is being written

A unit is written beside, then renamed: it is there whole or not at all, whenever its writer dies. After a loss of power
a file may be there without its bytes; its checksum tells, as it tells flipped bits. A unit that is not what was written
is deleted and is a miss. So is one of another identity, which the checksum covers. When the files pass `max_bytes`,
those used longest ago (by their time of change) are deleted until 5 % are free. Any process may do that while others
read: a file that is open stays readable.

Whoever reads a unit may tell the prompt, so files are their owner's alone (0600).

What the store cannot keep is told by an `Outage`. Every unit is a new try, and during an outage none waits for the
lock. A folder that was deleted is made anew.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import xxhash

from kvjax.errors import TierDataError
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.folder_lock import FolderLock, read_counter, write_counter
from kvjax.tiers.stores.outage import Outage
from kvjax.tiers.units import UnitKey

MAGIC = b"kvjaxU1\n"
HEADER = struct.Struct("<8sIQ16s")  # magic, bytes of the key, bytes of the unit, checksum
KEPT_SHARE = 0.95  # of `max_bytes`, after units were deleted
LOCK_WAIT_S = 1.0  # most that a unit waits for another process
OPEN_WAIT_S = 60.0  # likewise when a store is opened: others may be looking through a large folder
PROBATION_AGE = 4  # a file's time is divided by it: the oldest first, and all before those of today's units


class DiskStore:
    """One folder, opened by one engine. Every method may be called by any thread.

    `has` looks at an index in memory, which `refresh` brings up to date with what other processes wrote.
    """

    def __init__(
        self, folder: str | Path, max_bytes: int, identity: Mapping[str, str], stats: TierStats | None = None
    ) -> None:
        """Opens the folder, or makes it.

        Args:
            folder: of this store alone.
            max_bytes: most that its units may take.
            identity: what the units are of. All that open the folder give the same.
            stats: where reads and writes are counted.

        Raises:
            ValueError: the folder is of another identity, or something else, or `max_bytes` is not positive.
            TierDataError: another process holds the folder's lock for a minute.
        """
        if max_bytes < 1:
            raise ValueError(f"expected max_bytes >= 1, got {max_bytes}")
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.stats = TierStats() if stats is None else stats
        self._units = self.folder / "units"
        self._tmp = self.folder / "tmp"
        self._names = itertools.count()
        self._index: set[str] = set()
        self._lock = FolderLock(self.folder / ".lock")
        self._outage = Outage(f"the disk store in {self.folder}", self.stats)
        self._identity = dict(identity)
        self._seal = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).digest()
        self._opened: tuple[int, ...] | None = None  # which STORE.json was read
        self._scanned_s = 0.0
        self._open(self._lock.held(OPEN_WAIT_S))

    def has(self, key: UnitKey) -> bool:
        """Whether the unit was there when the store was looked through, or has been written here since."""
        return name_of(key) in self._index

    def put(self, key: UnitKey, data: np.ndarray, *, on_probation: bool = False) -> bool:  # uint8[n]
        """Writes a unit unless it is there; False: there is no room, or the disk fails, and nothing is there.

        One on probation counts as older than any other until it is read.
        """
        name = name_of(key)
        if name in self._index:
            return True
        size = HEADER.size + len(name) + data.nbytes
        if size > self.max_bytes:
            self.stats.num_disk_skips += 1
            return False
        try:
            self._keep_open()
            self._write(name, data, size, on_probation=on_probation)
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                self._opened = None  # a part of the folder is gone
            self.stats.num_disk_skips += 1
            self._outage.failed(error)
            return False
        self._outage.worked()
        self._index.add(name)
        self.stats.num_disk_writes += 1
        return True

    def _write(self, name: str, data: np.ndarray, size: int, *, on_probation: bool) -> None:
        """Raises OSError where it cannot, and leaves nothing behind."""
        temporary = self._tmp / f"{os.getpid()}-{next(self._names)}"
        self._reserve(size)
        try:
            encoded = name.encode()
            header = HEADER.pack(MAGIC, len(encoded), data.nbytes, _checksum(self._seal + encoded, data))
            with open(temporary, "wb", buffering=0, opener=_open_privately) as file:
                for part in (header + encoded, data):
                    write_all(file.fileno(), part)
                if on_probation:
                    os.utime(file.fileno(), ns=(0, time.time_ns() // PROBATION_AGE))
            target = self._path(name)
            target.parent.mkdir(exist_ok=True)
            if target.exists():  # another process was faster
                self._reserve(-size)
                temporary.unlink()
            else:
                temporary.replace(target)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            with suppress(OSError):
                self._reserve(-size)
            raise

    def get(self, key: UnitKey, out: np.ndarray) -> None:  # uint8[n]
        """Reads a unit into `out`.

        Raises:
            TierDataError: it is not there, or not what was written; then it is deleted. `out` may hold anything.
        """
        name = name_of(key)
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0, opener=_open_plainly) as file:
                problem = _read(file, name.encode(), out, self._seal)
                if problem is None:
                    os.utime(file.fileno())
        except FileNotFoundError:
            self._index.discard(name)
            raise TierDataError(f"unit {name} is on disk no more: another process needed its room") from None
        except OSError as error:
            self._index.discard(name)
            self.stats.num_disk_errors += 1
            raise TierDataError(f"unit {name} cannot be read: {error}") from error
        if problem is not None:
            self.stats.num_disk_errors += 1
            self.delete(key)
            raise TierDataError(f"{path}: {problem}; the file is deleted, and its tokens are computed again")

    def delete(self, key: UnitKey) -> None:
        """Deletes a unit, if it is there."""
        name = name_of(key)
        self._index.discard(name)
        with suppress(OSError):
            size = self._path(name).stat().st_size
            self._path(name).unlink()
            self._reserve(-size)

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Brings the index up to date, unless it was in the last `max_age_s`. Of a folder that is gone it is empty."""
        if time.monotonic() - self._scanned_s < max_age_s:
            return
        self._scanned_s = time.monotonic()
        try:
            found = {entry.name for entry in self._entries()}
        except OSError as error:
            found = set()
            self._outage.failed(error)
        self._index.update(found)
        self._index.intersection_update(found)

    def names_by_age(self) -> list[str]:
        """Names of all units, those used longest ago first."""
        return [name for _, name, _ in self._aged()]

    def name_weights(self, version: str, digest: str) -> None:
        """Notes of which weights a version is, for all that open the folder, from here on for ever.

        Raises:
            ValueError: it is known as the version of others. Nothing is changed.
            TierDataError: another process holds the folder's lock.
        """
        path = self.folder / "versions" / hashlib.sha256(version.encode()).hexdigest()[:32]
        with self._locked():
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                temporary = self._tmp / f"{os.getpid()}-{next(self._names)}"
                _write_text(temporary, f"{digest} {version}\n")
                temporary.replace(path)
            known = path.read_text().partition(" ")[0]
        if known != digest:
            raise ValueError(
                f"expected a version that names no other weights, got {version}, which the store in {self.folder} has "
                f"as weights {known}, here {digest}; give each update a version of its own"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all units, by the count that all processes keep."""
        with self._locked() as file:
            return self._counted(file)

    def _keep_open(self) -> None:
        """Opens the folder again where it is not the one that was opened: somebody deleted it since."""
        try:
            is_open = self._opened == _file_id(self.folder / "STORE.json")
        except FileNotFoundError:
            is_open = False
        if not is_open:
            self._open(self._locked())

    def _open(self, locked: AbstractContextManager[int]) -> None:
        identity = self._identity
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked as counter:
            path = self.folder / "STORE.json"
            if path.exists():
                check_identity(path, identity)
            elif any(self.folder.glob("[!.]*")):
                raise ValueError(f"expected an empty folder or a store of units, got {self.folder}")
            else:
                _write_text(path.with_suffix(".new"), json.dumps(identity, indent=1, sort_keys=True) + "\n")
                path.with_suffix(".new").replace(path)
            for folder in (self._units, self._tmp):
                folder.mkdir(exist_ok=True)
            self._delete_orphans()
            entries = list(self._entries())
            write_counter(counter, sum(_size_of(entry) for entry in entries))
            opened = _file_id(path)
        self._index = {entry.name for entry in entries}
        self._opened = opened
        self._scanned_s = time.monotonic()

    def _delete_orphans(self) -> None:
        """What dead processes were writing."""
        for entry in os.scandir(self._tmp):
            pid = entry.name.partition("-")[0]
            if pid != str(os.getpid()) and not _is_alive(pid):
                with suppress(OSError):
                    os.unlink(entry)

    def _reserve(self, num_bytes: int) -> None:
        """Counts bytes that come, or with a minus go; deletes units where there are too many.

        Raises:
            OSError: so many do not fit, and units cannot be deleted. Nothing is counted.
        """
        with self._locked() as file:
            total = self._counted(file) + num_bytes
            if num_bytes > 0 and total > self.max_bytes:
                total = self._delete_oldest(num_bytes)
            if num_bytes > 0 and total > self.max_bytes:
                raise OSError(errno.ENOSPC, f"its units take {total} of {self.max_bytes} bytes and cannot be deleted")
            write_counter(file, max(total, 0))

    def _counted(self, file: int) -> int:
        """Bytes of all units; a count that is damaged is made anew."""
        counted = read_counter(file)
        return sum(_size_of(entry) for entry in self._entries()) if counted is None else counted

    def _delete_oldest(self, coming_bytes: int) -> int:
        """Deletes units until so many more fit; the bytes that are counted then."""
        aged = self._aged()
        total = sum(size for _, _, size in aged) + coming_bytes
        for _, name, size in aged:
            if total <= self.max_bytes * KEPT_SHARE:
                break
            with suppress(OSError):
                self._path(name).unlink()
                self._index.discard(name)
                total -= size
        return total

    def _aged(self) -> list[tuple[int, str, int]]:
        """Time of last use, name and bytes of each unit, those used longest ago first."""
        aged = []
        for entry in self._entries():
            with suppress(FileNotFoundError):
                status = entry.stat()
                aged.append((status.st_mtime_ns, entry.name, status.st_size))
        return sorted(aged)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for folder in os.scandir(self._units):
            with suppress(FileNotFoundError, NotADirectoryError):
                yield from os.scandir(folder)

    def _path(self, name: str) -> Path:
        return self._units / name.rpartition("-")[2][:2] / name

    def _locked(self) -> AbstractContextManager[int]:
        return self._lock.held(0.0 if self._outage.is_out else LOCK_WAIT_S)


def name_of(key: UnitKey) -> str:
    """A unit's file name: group and block hash."""
    return f"{key.group_id}-{bytes(key.block_hash).hex()}"


def check_identity(path: Path, identity: Mapping[str, str]) -> None:
    """Raises ValueError unless the file at `path` tells the same identity."""
    try:
        found = json.loads(path.read_text())
        assert isinstance(found, dict)
    except (ValueError, AssertionError, RecursionError):
        raise ValueError(f"expected a store of units in {path.parent}, but {path.name} is none") from None
    others = [name for name in sorted({*found, *identity}) if found.get(name) != identity.get(name)]
    if others:
        told = "; ".join(f"{name} {found.get(name)!r} there, {identity.get(name)!r} here" for name in others)
        raise ValueError(f"the store in {path.parent} is of another cache: {told}; give this one a folder of its own")


def write_all(file: int, data: bytes | np.ndarray) -> None:
    """Writes all of `data`; raises OSError where the disk is full."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(file, view) :]


def _file_id(path: Path) -> tuple[int, ...]:
    """Tells a file from a later one of its name."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _open_privately(path: str, flags: int) -> int:
    """Opens a file that nobody else may read, if it is new."""
    return os.open(path, flags, 0o600)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", opener=_open_privately) as file:
        file.write(text)


def _open_plainly(path: str, flags: int) -> int:
    """Opens a file without waiting where it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file, name: bytes, out: np.ndarray, seal: bytes) -> str | None:  # type: ignore[no-untyped-def]
    """Reads a unit into `out`; what is wrong with it."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return f"expected a header of {HEADER.size} bytes, got {len(header)}"
    magic, name_len, num_bytes, checksum = HEADER.unpack(header)
    if magic != MAGIC or (name_len, num_bytes) != (len(name), out.nbytes):
        return f"expected a unit of {out.nbytes} bytes, got another header"
    if file.read(name_len) != name:
        return "expected a unit of this name, got another"
    view = memoryview(out).cast("B")
    while view.nbytes:
        count = file.readinto(view)
        if not count:
            return f"expected {view.nbytes} bytes more"
        view = view[count:]
    return None if _checksum(seal + name, out) == checksum else "its checksum is not that of its bytes"


def _checksum(name: bytes, data: np.ndarray) -> bytes:
    state = xxhash.xxh3_128(name)
    state.update(memoryview(data).cast("B"))
    return state.digest()


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


__all__ = ["KEPT_SHARE", "DiskStore", "check_identity", "name_of"]
