"""Which of the processes of a computation are still there, and an end of this one when another is lost.

Flow:    a connection that closes, a host that is silent -> [PeerWatch] -> PeerLostError, exit status 75

Process 0 opens a door, and says on the coordinator's board where it is and by what key it opens. Every other process
connects and stays connected. The kernel of a process that dies, however that is, closes its connections; a host that
is gone answers no keepalive, which kernels send once a second. Process 0 tells the others of each loss.

    there    connected
    ended    its interpreter has exited without an error, and it said so
    lost     its connection is gone, and it said nothing

A computation does not outlive a process: collectives wait for it for ever. So what waits on the host raises
PeerLostError, `before_end` is called, and a second later the process ends with the status of `LOST_STATUS`. Where jax's
coordination client aborts the process, as it does when process 0 is gone, that end comes first (`AbortTrap`).
"""

from __future__ import annotations

import atexit
import functools
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jax._src import distributed

from kvjax.device.mesh.abort_trap import AbortTrap
from kvjax.errors import PeerLostError

logger = logging.getLogger("kvjax.device")

LOST_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the processes again
GRACE_S = 1.0  # from the news of a loss to the end of this process
DOOR_KEY = "kvjax/peers/door"
DOOR_TIMEOUT_MS = 600_000  # a process may be long in coming to where process 0 opens it
CONNECT_TIMEOUT_S = 10.0
SILENCE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, probes: 4 s in all
KEY_BYTES = 32
HELLO = struct.Struct(f"!{KEY_BYTES}sI")  # key, number of the process
NEWS = struct.Struct("!cI")  # ENDED or LOST, number of the process
ENDED, LOST = b"e", b"l"
MOST_STRANGERS = 64  # connections that have not shown the key yet
CLOSED = "its connection is closed: it was killed, or has failed"
SILENT = "its host does not answer"


@dataclass(frozen=True)
class Loss:
    """A process that is gone."""

    process: int
    reason: str


class PeerWatch:
    """One for a process, made by `watch_peers`. Its thread sleeps until something happens. Methods are for any thread.

    `before_end` are called once another process is lost, by a thread of their own, and have a second; what they return
    is told on stderr.
    """

    def __init__(self, index: int, num_processes: int) -> None:
        self.before_end: list[Callable[[], str]] = []
        self.index, self.num_processes = index, num_processes
        self.ended: set[int] = set()  # processes that ended well
        self._loss: Loss | None = None
        self._news = threading.Event()  # of the loss
        self._has_failed = False
        self._is_leaving = False  # has failed by itself, and the others are told
        self._lines: list[socket.socket] = []  # to the others: of process 0 to all, of another to process 0
        self._trap = AbortTrap(self._end_before_abort)

    def start(self, watch: Callable[[], None]) -> None:
        """Watches from here on, by a thread that runs `watch`."""
        self.arm()
        excepthook = sys.excepthook

        def note_failure(*error: Any) -> None:
            self._has_failed = True
            excepthook(*error)

        sys.excepthook = note_failure
        atexit.register(self._end)
        threading.Thread(target=watch, name="kvjax-peers", daemon=True).start()

    def arm(self) -> None:
        """Sees to it that an abort is noticed; what a device's library puts in the way is put behind."""
        self._trap.arm()

    def lost(self, wait_s: float = 0.0) -> Loss | None:
        """The first process that was lost, as soon as one is; None: none is for so long."""
        self._news.wait(wait_s)
        return self._loss

    def check(self, wait_s: float = 0.0, cause: BaseException | None = None) -> None:
        """Raises PeerLostError, from `cause`, if a process is lost, or is within `wait_s`."""
        loss = self.lost(wait_s)
        if loss is not None:
            raise PeerLostError(self._text(loss), loss.process) from cause

    # -- its thread ----------------------------------------------------------------------------------------------------

    def add_line(self, line: socket.socket) -> None:
        """Another process is connected."""
        self._lines.append(line)

    def note_end(self, process: int) -> None:
        """A process has ended well; that is no loss, unless another waits for it."""
        self.ended.add(process)
        self._tell(ENDED, process)

    def note_loss(self, process: int, reason: str) -> None:
        """A process is gone, and so is this one in a second, if it does not end before."""
        if self._loss is not None or process == self.index:
            return
        if self._is_leaving:  # at its exit, where jax waits for the others
            time.sleep(GRACE_S)
            os._exit(1)
        self._loss = Loss(process, reason)
        self._tell(LOST, process)
        self._news.set()
        told: list[str] = []
        last = threading.Thread(target=self._call_before_end, args=(told,), daemon=True)
        last.start()
        end_s = time.monotonic() + GRACE_S
        last.join(GRACE_S)
        text = "; ".join([self._text(self._loss), *told, f"process {self.index} ends with status {LOST_STATUS}"])
        _write_error(f"kvjax: {text}\n")
        time.sleep(max(end_s - time.monotonic(), 0.0))
        os._exit(LOST_STATUS)

    def _call_before_end(self, told: list[str]) -> None:
        for call in self.before_end:
            try:
                told.append(call())
            except Exception:
                logger.exception("what was to be done before the process ends raised")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """At the interpreter's exit."""
        if self._has_failed:  # perhaps as another is lost, whose name the others are to hear first
            self.lost(GRACE_S)
        if self._loss is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            time.sleep(2 * GRACE_S)  # its thread ends the process before
            os._exit(LOST_STATUS)
        self._is_leaving = self._has_failed
        if not self._has_failed:
            self._tell(ENDED, self.index)
        for line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)

    def _end_before_abort(self) -> None:
        """In a thread that is about to abort the process."""
        if self.lost(GRACE_S) is not None:
            time.sleep(2 * GRACE_S)  # as above
            os._exit(LOST_STATUS)
        if self._is_leaving:
            os._exit(1)

    def _tell(self, what: bytes, process: int) -> None:
        for line in self._lines:
            with suppress(OSError):
                line.send(NEWS.pack(what, process))

    def _text(self, loss: Loss) -> str:
        return f"process {loss.process} of {self.num_processes} is lost: {loss.reason}"


class _Door:
    """Where the others connect to process 0."""

    def __init__(self, watch: PeerWatch, host: str) -> None:
        self._watch = watch
        self._key = secrets.token_bytes(KEY_BYTES)
        self._socket = _listen(host)
        self._strangers: dict[socket.socket, bytearray] = {}  # what they have said
        self._processes: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    @property
    def address(self) -> str:
        """What the others need to come in."""
        return f"{self._socket.getsockname()[1]} {self._key.hex()}"

    def watch(self) -> None:
        """Sees all comings and goings."""
        while True:
            for key, _ in self._selector.select():
                line = key.fileobj
                assert isinstance(line, socket.socket)
                if line is self._socket:
                    self._meet()
                elif line in self._strangers:
                    self._hear_stranger(line)
                else:
                    self._hear_process(line)

    def _meet(self) -> None:
        with suppress(OSError):
            line, _ = self._socket.accept()
            line.setblocking(False)
            self._strangers[line] = bytearray()
            self._selector.register(line, selectors.EVENT_READ)
        if len(self._strangers) > MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _hear_stranger(self, line: socket.socket) -> None:
        said = self._strangers[line]
        try:
            data = line.recv(HELLO.size - len(said))
        except OSError:
            data = b""
        said += data
        if not data:
            self._drop(line)
        elif len(said) == HELLO.size:
            key, process = HELLO.unpack(said)
            if not hmac.compare_digest(key, self._key) or not 0 < process < self._watch.num_processes:
                self._drop(line)
                return
            del self._strangers[line]
            self._processes[line] = process
            _keep_alive(line)
            self._watch.add_line(line)

    def _hear_process(self, line: socket.socket) -> None:
        line.setblocking(True)  # its news are there, in a piece
        news = _hear(line)
        self._selector.unregister(line)
        process = self._processes.pop(line)
        if news.what == ENDED:
            self._watch.note_end(process)
        else:
            self._watch.note_loss(process, news.reason)

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._strangers[line]
        line.close()


@functools.cache
def watch_peers() -> PeerWatch:
    """The watch of this process, which has joined others; it begins when this is first called, in each of them.

    Raises:
        ValueError: this process has joined no others.
    """
    client: Any = distributed.global_state.client
    address: Any = distributed.global_state.coordinator_address
    if client is None:
        raise ValueError("expected processes that have joined (join_processes, jax.distributed), got one alone")
    host = address.rsplit(":", 1)[0].strip("[]")
    watch = PeerWatch(distributed.global_state.process_id, distributed.global_state.num_processes)
    if watch.index == 0:
        door = _Door(watch, host)
        client.key_value_set(DOOR_KEY, door.address)
        watch.start(door.watch)
        return watch
    port, key = client.blocking_key_value_get(DOOR_KEY, DOOR_TIMEOUT_MS).split()
    try:
        line = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    except OSError as error:
        logger.warning(
            "process %d cannot connect to process 0 at %s:%s (%s): it is told of no lost process, which jax notices in "
            "100 s; let processes connect to each other",
            watch.index, host, port, error,
        )  # fmt: skip
        return watch
    line.settimeout(None)
    _keep_alive(line)
    line.sendall(HELLO.pack(bytes.fromhex(key), watch.index))
    watch.add_line(line)
    watch.start(functools.partial(_watch_line, watch, line))
    return watch


def _watch_line(watch: PeerWatch, line: socket.socket) -> None:
    """Hears what process 0 tells, until it ends."""
    while True:
        news = _hear(line)
        process = news.process or 0
        if news.what != ENDED:
            watch.note_loss(process, news.reason)
        watch.ended.add(process)
        if process == 0:
            return


@dataclass(frozen=True)
class _News:
    what: bytes
    process: int | None  # None: the one at the other end
    reason: str = "another process says so"


def _hear(line: socket.socket) -> _News:
    """What the other end says next, or that it is gone."""
    try:
        data = line.recv(NEWS.size, socket.MSG_WAITALL)
    except TimeoutError:
        return _News(LOST, None, SILENT)
    except OSError as error:
        return _News(LOST, None, f"{CLOSED} ({error})")
    if len(data) < NEWS.size:
        return _News(LOST, None, CLOSED)
    return _News(*NEWS.unpack(data))


def _listen(host: str) -> socket.socket:
    """A socket where the coordinator's host is, or everywhere if that name is not this machine's own."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for address in (place[0], "::" if family == socket.AF_INET6 else ""):
        with suppress(OSError):
            return socket.create_server((str(address), 0), family=family)
    raise OSError(f"expected a port for the other processes at {host}, got none")


def _keep_alive(line: socket.socket) -> None:
    """Has the kernel ask whether the other host is there."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _write_error(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())


__all__ = ["LOST_STATUS", "Loss", "PeerWatch", "watch_peers"]
