"""Which backend a configuration means.

Flow:    SharedTierConfig -> [open_backend] -> RedisBackend, ObjectBackend, or the caller's own
"""

from __future__ import annotations

from kvjax.tiers.shared.backend import Backend
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.object_backend import ObjectBackend
from kvjax.tiers.shared.redis_backend import SCHEMES, RedisBackend


def open_backend(config: SharedTierConfig) -> Backend:
    """A backend, which has not connected yet.

    Raises:
        ValueError: no client knows such a store, or `expire_s` comes with one that is not Redis.
        MissingExtraError: the client is not installed.
    """
    store = config.store
    if isinstance(store, str) and store.partition("://")[0] in SCHEMES:
        return RedisBackend(store, config.timeout_s, config.expire_s)
    if config.expire_s is not None:
        raise ValueError(f"expected expire_s with a store of Redis alone, got {config.place}; set its own rules there")
    if isinstance(store, str):
        return ObjectBackend.of_url(store, config.timeout_s)
    if all(hasattr(store, name) for name in ("have", "get", "put", "delete", "close")):
        return store  # type: ignore[no-any-return]
    if type(store).__module__.partition(".")[0] in ("obstore", "builtins") and hasattr(store, "put_async"):
        return ObjectBackend(store)
    raise ValueError(f"expected an address, a store of obstore or a Backend, got {type(store).__name__}")


__all__ = ["open_backend"]
