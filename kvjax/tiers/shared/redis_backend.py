"""Valkey or Redis as a backend, by the client `redis`, which speaks to both.

Flow:    SharedStore -> [RedisBackend] -> redis.asyncio

Commands go in pipelines, so that one way there and back serves several units. What the server evicts, and when, is its
own affair (`maxmemory-policy`); with `expire_s` a unit leaves that long after it was last written or read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.extras import require_extra
from kvjax.tiers.shared.backend import Value

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
MAX_CONNECTIONS = 8
PIPELINE_UNITS = 8  # of one pipeline that moves bytes


class RedisBackend:
    """A `Backend` over one server."""

    def __init__(self, url: str, timeout_s: float, expire_s: float | None = None) -> None:
        """`timeout_s`: of connecting, and of each wait for the server. Nothing is connected yet.

        Raises:
            ValueError: the address is none.
            MissingExtraError: redis is not installed.
        """
        client = require_extra("redis.asyncio", "shared-redis", "a shared tier on Valkey or Redis")
        retries = require_extra("redis.asyncio.retry", "shared-redis", "a shared tier on Valkey or Redis")
        backoff = require_extra("redis.backoff", "shared-redis", "a shared tier on Valkey or Redis")
        scheme, _, rest = url.partition("://")
        pool = client.BlockingConnectionPool.from_url(
            f"{SCHEMES[scheme]}://{rest}",
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=retries.Retry(backoff.NoBackoff(), 1),  # a server that was restarted has closed idle connections
        )
        self._client = client.Redis.from_pool(pool)
        self._expiry = {} if expire_s is None else {"px": max(int(expire_s * 1000), 1)}

    async def have(self, names: Sequence[str]) -> list[bool]:
        """As `Backend.have`, in one pipeline."""
        return [bool(found) for found in await self._execute(("exists", name) for name in names)]

    async def get(self, names: Sequence[str]) -> list[Value | None]:
        """As `Backend.get`."""
        command = "getex" if self._expiry else "get"
        values: list[Value | None] = []
        for first in range(0, len(names), PIPELINE_UNITS):
            values += await self._execute((command, name) for name in names[first : first + PIPELINE_UNITS])
        return values

    async def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """As `Backend.put`."""
        for first in range(0, len(items), PIPELINE_UNITS):
            await self._execute(("set", *item) for item in items[first : first + PIPELINE_UNITS])

    async def delete(self, names: Sequence[str]) -> None:
        """As `Backend.delete`; the server frees their memory by itself."""
        await self._client.unlink(*names)

    async def close(self) -> None:
        """As `Backend.close`."""
        await self._client.aclose()

    async def _execute(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The server's answers; raises what one of them says is wrong."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for command, *arguments in commands:
                options = self._expiry if command in ("set", "getex") else {}
                getattr(pipeline, command)(*arguments, **options)
            return list(await pipeline.execute())


__all__ = ["SCHEMES", "RedisBackend"]
