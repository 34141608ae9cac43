"""A proxy before a server: it holds bytes back, hands them out in drops, or cuts connections."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Listens on a port of its own; `mode` may change at any time, for open connections too."""

    def __init__(self, port: int) -> None:
        """Before the server at `port`."""
        self.mode = "pass"  # or "hold", "drip", "cut"
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cuts all connections."""
        self._is_closed = True
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._is_closed:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, target, target is client), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.mode == "cut" and is_answer:
                    break
                while self.mode == "hold" and not self._is_closed:
                    time.sleep(0.005)
                if self.mode == "drip" and is_answer:
                    self._drip(data, target)
                else:
                    target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _drip(self, data: bytes, target: socket.socket) -> None:
        """A byte at a time: no wait for the socket is long, all of it takes for ever."""
        for place in range(len(data)):
            if self.mode != "drip" or self._is_closed:
                target.sendall(data[place:])
                return
            target.sendall(data[place : place + 1])
            time.sleep(0.005)
