"""Settings of the tier that replicas share.

Flow:    caller or command line -> [SharedTierConfig] -> TierConfig.shared -> SharedStore
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MIN_SECRET_BYTES = 16
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_POSITIVE = ("timeout_s", "lookup_timeout_s", "retry_s", "expire_s", "max_bytes_in_flight", "num_threads")


@dataclass(frozen=True, kw_only=True)
class SharedTierConfig:
    """A store that replicas share, below host and disk. Whatever a replica computes there is loaded by all.

    `store` is an address: redis://, rediss://, unix:// and valkey:// of Valkey or Redis; s3://, gs://, az://, file://
    and what else `obstore.store.from_url` takes. Or it is a store of obstore, or any `Backend`. All keys begin with
    `prefix`: give each tenant one of its own, and let the store's own rules say who may read which.

    With a `secret` units are encrypted and authenticated, and their names tell nothing. The key of each unit is made of
    the secret and the unit's block hash, which covers the request's salt. Engines with another secret find nothing.

    A call to the store that takes longer than `timeout_s` has failed. A lookup that takes longer than
    `lookup_timeout_s` is given up, and its prompt computed. After three failures in a row the store is left alone, and
    asked once in `retry_s` whether it is well. Units leave Redis `expire_s` after their last use; None: the store
    decides what it evicts. At most `max_bytes_in_flight` are on their way to the store, and what comes beyond is not
    sent. `num_threads` read and as many write.

    Raises:
        ValueError: a value is outside its range, a prefix has other characters than letters, digits, "_.-/", a secret
            is short, or `expire_s` comes with a store that is not Redis.
    """

    store: Any = field(repr=False)  # an address may have a password
    prefix: str = "kvjax"
    secret: str | bytes | None = field(default=None, repr=False)
    timeout_s: float = 2.0
    lookup_timeout_s: float = 0.2
    retry_s: float = 5.0
    expire_s: float | None = None
    max_bytes_in_flight: int = 1 << 28
    num_threads: int = 2

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} > 0, got {value}")
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix) or ".." in self.prefix:
            raise ValueError(f"expected a prefix of letters, digits and _.- in parts divided by /, got {self.prefix!r}")
        if self.secret is not None and len(self.secret_bytes) < MIN_SECRET_BYTES:
            raise ValueError(f"expected a secret of {MIN_SECRET_BYTES} bytes or more, got {len(self.secret_bytes)}")
        if isinstance(self.store, str) and not urlsplit(self.store).scheme:
            raise ValueError(f"expected an address, such as redis://host or s3://bucket, got {self.place!r}")

    @property
    def secret_bytes(self) -> bytes:
        """The secret; empty: there is none."""
        secret = b"" if self.secret is None else self.secret
        return secret.encode() if isinstance(secret, str) else secret

    @property
    def place(self) -> str:
        """The store's address without user and password, for people."""
        if not isinstance(self.store, str):
            return type(self.store).__name__
        parts = urlsplit(self.store)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


__all__ = ["SharedTierConfig"]
