"""A proxy between peers that delays, drops, duplicates, truncates and reorders what it forwards."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FAULTS = ("delay", "drop", "duplicate", "truncate", "reorder", "flip")
MAX_DELAY_S = 0.02


class FaultyProxy:
    """Listens at `address` for connections to `target`, both `host:port`."""

    def __init__(self, target: str, rate: float, seed: int) -> None:
        self.rate = rate  # of faulty pieces
        self.counts = dict.fromkeys(FAULTS, 0)
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        held = b""
        with suppress(OSError):
            while data := source.recv(1 << 14):
                fault = self._rng.choice(FAULTS) if self._rng.random() < self.rate else ""
                if fault:
                    self.counts[fault] += 1
                if fault == "delay":
                    self._ended.wait(MAX_DELAY_S * self._rng.random())
                elif fault == "drop":
                    continue
                elif fault == "duplicate":
                    data = 2 * data
                elif fault == "truncate":
                    sink.sendall(data[: len(data) // 2])
                    break
                elif fault == "reorder" and not held:
                    held = data
                    continue
                elif fault == "flip":
                    data = bytes([data[0] ^ 1]) + data[1:]
                sink.sendall(data + held)
                held = b""
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def faulty_proxy(target: str, rate: float, seed: int = 0) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target, rate, seed)
    try:
        yield proxy
    finally:
        proxy.close()
