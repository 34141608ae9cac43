"""An object store as a backend: S3, Google's, Azure's, a folder or memory, by the client `obstore`.

Flow:    SharedStore -> [ObjectBackend] -> obstore

Each unit is an object, asked for and moved by a request of its own, `MAX_REQUESTS` at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvjax.extras import require_extra
from kvjax.tiers.shared.backend import Value, told

MAX_REQUESTS = 32
T = TypeVar("T")


class ObjectBackend:
    """A `Backend` over a store of obstore."""

    def __init__(self, store: Any, folder: Path | None = None) -> None:
        """`folder`: where a `LocalStore` has its files, which are made readable by their owner alone."""
        self._obstore = require_extra("obstore", "shared-object", "a shared tier on an object store")
        self._store = store
        self._folder = folder
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    @classmethod
    def of_url(cls, url: str, timeout_s: float) -> ObjectBackend:
        """The store of an address. Its client gives a request up after `timeout_s` too, and retries nothing longer.

        Raises:
            ValueError: obstore knows no such store.
            MissingExtraError: obstore is not installed.
        """
        stores = require_extra("obstore.store", "shared-object", "a shared tier on an object store")
        parts = urlsplit(url)
        if parts.scheme == "memory":
            return cls(stores.MemoryStore())
        if parts.scheme == "file":
            folder = Path(url2pathname(parts.path))
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(stores.LocalStore(folder), folder)
        seconds = f"{timeout_s:.3f}s"
        options = {"timeout": seconds, "connect_timeout": seconds}
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):  # options that are given hide those of there
            options["allow_http"] = "true"
        try:
            store = stores.from_url(
                url,
                client_options=options,
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)},
            )
        except Exception as error:  # obstore's own types, which depend on the scheme
            place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
            raise ValueError(
                f"expected the address of a store that obstore opens, got {place!r}: {told(error)}"
            ) from error
        return cls(store)

    async def have(self, names: Sequence[str]) -> list[bool]:
        """As `Backend.have`: a HEAD request for each."""
        return await self._each(self._has, ((name,) for name in names))

    async def get(self, names: Sequence[str]) -> list[Value | None]:
        """As `Backend.get`."""
        return await self._each(self._get, ((name,) for name in names))

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """As `Backend.put`: an object is there whole or not at all."""
        await self._each(self._put, items)

    async def delete(self, names: Sequence[str]) -> None:
        """As `Backend.delete`."""
        await self._each(self._delete, ((name,) for name in names))

    async def close(self) -> None:
        """As `Backend.close`; nothing is open between requests."""

    async def _has(self, name: str) -> bool:
        try:
            await self._obstore.head_async(self._store, name)
        except FileNotFoundError:
            return False
        return True

    async def _get(self, name: str) -> Value | None:
        try:
            found = await self._obstore.get_async(self._store, name)
            return await found.bytes_async()
        except FileNotFoundError:
            return None

    async def _put(self, name: str, data: bytes) -> None:
        await self._obstore.put_async(self._store, name, data, use_multipart=False)
        if self._folder is not None:
            with suppress(FileNotFoundError):  # somebody else has deleted it
                os.chmod(self._folder / name, 0o600)

    async def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await self._obstore.delete_async(self._store, name)

    async def _each(self, call: Callable[..., Awaitable[T]], arguments: Iterable[tuple[Any, ...]]) -> list[T]:
        """Calls for each, so many at a time. The first that raises ends the others."""
        tasks = [asyncio.ensure_future(self._in_turn(call, *each)) for each in arguments]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _in_turn(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        async with self._slots:
            return await call(*args)


__all__ = ["ObjectBackend"]
