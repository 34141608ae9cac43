"""How a unit lies in a shared store: its name there, and its bytes with what proves them.

Flow:    UnitKey, identity -> [Seals.name_of] ; pages -> [close] -> value in the store -> [open] -> bytes of the unit

A value is a header and the bytes. The name covers what the units are of (layout, model, weights, hashes), group and
block hash, which covers tokens, salt and adapter. What proves the bytes covers the name, so a value under another name
is none.

    PlainSeals       XXH3 of 128 bits. Finds damage of every kind; whoever writes to the store can forge it.
    EncryptedSeals   AES-256-GCM (encrypted_seals.py). Names are keyed hashes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from kvjax.errors import TierDataError
from kvjax.tiers.units import UnitKey

MAGIC = b"kvjaxS1\n"
HEADER = struct.Struct("<8sQ16s")  # magic, bytes of the unit, checksum


class Seals(Protocol):
    """Names and seals of units of one cache. Any thread may call it."""

    def name_of(self, key: UnitKey) -> str:
        """Where the unit lies."""

    def close(self, key: UnitKey, parts: Sequence[np.ndarray]) -> bytes:  # uint8[n] each
        """A value of all parts, one after another."""

    def open(self, key: UnitKey, value: Any, num_bytes: int) -> np.ndarray:  # uint8[num_bytes]
        """The bytes of a value.

        Raises:
            TierDataError: they are not those of the unit.
        """


class PlainSeals:
    """`Seals` with checksums."""

    def __init__(self, prefix: str, identity: Mapping[str, str]) -> None:
        self._folder = f"{prefix}/{hashlib.sha256(identity_bytes(identity)).hexdigest()[:32]}"

    def name_of(self, key: UnitKey) -> str:
        """As `Seals.name_of`: group and block hash in hexadecimal."""
        return f"{self._folder}/{key.group_id}-{bytes(key.block_hash).hex()}"

    def close(self, key: UnitKey, parts: Sequence[np.ndarray]) -> bytes:
        """As `Seals.close`; reads the parts twice and copies them once."""
        checksum = xxhash.xxh3_128(self.name_of(key).encode())
        for part in parts:
            checksum.update(memoryview(part).cast("B"))
        header = HEADER.pack(MAGIC, sum(part.nbytes for part in parts), checksum.digest())
        return b"".join([header, *(memoryview(part).cast("B") for part in parts)])

    def open(self, key: UnitKey, value: Any, num_bytes: int) -> np.ndarray:
        """As `Seals.open`: a view of the value, which is read once."""
        data, checksum = split(value, num_bytes, HEADER, MAGIC)
        found = xxhash.xxh3_128(self.name_of(key).encode())
        found.update(data)
        if found.digest() != checksum:
            raise TierDataError("expected the unit that was written, got bytes with another checksum")
        return np.frombuffer(data, np.uint8)


def split(value: Any, num_bytes: int, header: struct.Struct, magic: bytes, more: int = 0) -> tuple[memoryview, bytes]:
    """The bytes behind the header, `more` than those of the unit, and what the header has to prove them.

    Raises:
        TierDataError: there is no such header, or more or fewer bytes than it says.
    """
    try:
        view = memoryview(value).cast("B")
    except TypeError:
        raise TierDataError(f"expected bytes, got {type(value).__name__}") from None
    if view.nbytes < header.size:
        raise TierDataError(f"expected a header of {header.size} bytes, got {view.nbytes}")
    found, length, proof = header.unpack_from(view)
    if found != magic or length != num_bytes or view.nbytes - header.size != num_bytes + more:
        raise TierDataError(f"expected a unit of {num_bytes} bytes, got another value, or a part of one")
    return view[header.size :], proof


def identity_bytes(identity: Mapping[str, str]) -> bytes:
    """A text of all of it, the same in every process."""
    return json.dumps(sorted(identity.items())).encode()


__all__ = ["PlainSeals", "Seals", "identity_bytes", "split"]
