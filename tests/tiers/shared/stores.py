"""Stores for tests of the shared tier: obstore's, a redis-server with a password, and one that lies.

A server is started once a process, and every store of it begins with a prefix that no other test has.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvjax.tiers.shared.config import SharedTierConfig

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(SERVER is None, reason="there is neither valkey-server nor redis-server on the PATH")
PASSWORD = "open sesame"
UNHURRIED: dict[str, Any] = {"timeout_s": 30.0, "lookup_timeout_s": 30.0, "retry_s": 0.05}  # on a busy machine
_prefixes = itertools.count()


class Server:
    """A redis-server on a port of its own."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.folder = folder
        self.process = self._start(options)

    @property
    def url(self) -> str:
        """Its address, password included."""
        return f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.port}"

    def _start(self, options: Sequence[str]) -> subprocess.Popen[bytes]:
        assert SERVER is not None
        config = self.folder / "server.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f'requirepass "{PASSWORD}"', 'save ""', f"dir {self.folder}"]
        config.write_text("\n".join([*lines, *options]) + "\n")
        process = subprocess.Popen([SERVER, str(config)], stdout=subprocess.DEVNULL)
        for _ in range(2_000):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.01)
        raise AssertionError("the server does not start")

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def new_prefix() -> str:
    """A prefix that no other test of this process has."""
    return f"test/{next(_prefixes)}"


class LyingBackend:
    """A backend before another one, which hands out values that `lie` makes of the right ones."""

    def __init__(self, under: Any) -> None:
        self.under = under
        self.lie: Any = None  # (name, value) -> value or None
        self.problem: BaseException | None = None  # raised by every call
        self.refuses_writes: BaseException | None = None
        self.hangs = False
        self.num_calls = 0

    async def _before(self) -> None:
        self.num_calls += 1
        if self.problem is not None:
            raise self.problem
        if self.hangs:
            await asyncio.sleep(3600)

    async def have(self, names: Sequence[str]) -> list[bool]:
        await self._before()
        return list(await self.under.have(names))

    async def get(self, names: Sequence[str]) -> list[Any]:
        await self._before()
        values = await self.under.get(names)
        return values if self.lie is None else [self.lie(*pair) for pair in zip(names, values, strict=True)]

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        await self._before()
        if self.refuses_writes is not None:
            raise self.refuses_writes
        await self.under.put(items)

    async def delete(self, names: Sequence[str]) -> None:
        await self.under.delete(names)

    async def close(self) -> None:
        await self.under.close()


def memory_store() -> Any:
    """An object store of this process."""
    import obstore.store

    return obstore.store.MemoryStore()


KINDS = ["memory", "folder", pytest.param("redis", marks=needs_server)]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all tests that do it no harm."""
    with tempfile.TemporaryDirectory() as folder:
        one = Server(Path(folder))
        yield one
        one.end()


@pytest.fixture
def config(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> SharedTierConfig:
    """A store of the test's `kind`, whose engines share it."""
    if kind == "memory":
        store: Any = memory_store()
    elif kind == "folder":
        store = (tmp_path / "store").as_uri()
    else:
        store = request.getfixturevalue("server").url
    return SharedTierConfig(store=store, prefix=new_prefix(), **UNHURRIED)
