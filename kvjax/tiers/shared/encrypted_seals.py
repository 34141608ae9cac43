"""Units that only holders of a secret can read, find or forge, by the library `cryptography`.

Flow:    secret, identity -> [EncryptedSeals] -> name and AES-256-GCM of each unit
Source:  HKDF of RFC 5869, with SHA-256; nonces of NIST SP 800-38D, 8.2.2 (random)

    root     HKDF-Extract(salt = "kvjax shared tier 1" and a hash of the identity, the secret)
    folder   HKDF-Expand(root, "folder")
    name     HKDF-Expand(root, "name", group, block hash)
    key      HKDF-Expand(root, "key", group, block hash)

A block hash covers the request's salt, so each salt has keys of its own: who knows the secret, and not the salt and the
tokens, knows neither name nor key. That holds of hashes that cannot be turned back (sha256). The nonce is random, and
what is authenticated beside the bytes is the name: a value under another name does not open.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.errors import TierDataError
from kvjax.extras import require_extra
from kvjax.tiers.shared.seals import identity_bytes, split
from kvjax.tiers.units import UnitKey

MAGIC = b"kvjaxE1\n"
HEADER = struct.Struct("<8sQ12s")  # magic, bytes of the unit, nonce
TAG_BYTES = 16
LABEL = b"kvjax shared tier 1"


class EncryptedSeals:
    """`Seals` by a secret."""

    def __init__(self, prefix: str, identity: Mapping[str, str], secret: bytes) -> None:
        """Raises MissingExtraError where cryptography is not installed."""
        ciphers = require_extra("cryptography.hazmat.primitives.ciphers.aead", "shared-encrypted", "encrypted units")
        self._exceptions = require_extra("cryptography.exceptions", "shared-encrypted", "encrypted units")
        self._hkdf = require_extra("cryptography.hazmat.primitives.kdf.hkdf", "shared-encrypted", "encrypted units")
        hashes = require_extra("cryptography.hazmat.primitives.hashes", "shared-encrypted", "encrypted units")
        self._cipher = ciphers.AESGCM
        self._hash = hashes.SHA256()
        salt = LABEL + hashlib.sha256(identity_bytes(identity)).digest()
        self._root = hmac.digest(salt, secret, "sha256")
        self._folder = f"{prefix}/{self._expand(b'folder').hex()[:32]}"

    def name_of(self, key: UnitKey) -> str:
        """As `Seals.name_of`; says nothing of the block hash to whoever lacks the secret."""
        return f"{self._folder}/{self._expand(b'name' + _text(key)).hex()}"

    def close(self, key: UnitKey, parts: Sequence[np.ndarray]) -> bytes:
        """As `Seals.close`."""
        nonce = os.urandom(12)
        data = b"".join(memoryview(part).cast("B") for part in parts)
        header = HEADER.pack(MAGIC, len(data), nonce)
        return header + bytes(self._of(key).encrypt(nonce, data, self.name_of(key).encode() + header))

    def open(self, key: UnitKey, value: Any, num_bytes: int) -> np.ndarray:
        """As `Seals.open`."""
        data, nonce = split(value, num_bytes, HEADER, MAGIC, TAG_BYTES)
        header = HEADER.pack(MAGIC, num_bytes, nonce)
        try:
            opened = self._of(key).decrypt(nonce, data, self.name_of(key).encode() + header)
        except self._exceptions.InvalidTag:
            raise TierDataError("expected the unit that was written, got bytes that were not sealed for it") from None
        return np.frombuffer(opened, np.uint8)

    def _of(self, key: UnitKey) -> Any:
        return self._cipher(self._expand(b"key" + _text(key)))

    def _expand(self, info: bytes) -> bytes:
        return bytes(self._hkdf.HKDFExpand(self._hash, 32, info).derive(self._root))


def _text(key: UnitKey) -> bytes:
    return struct.pack("<Q", key.group_id) + bytes(key.block_hash)


__all__ = ["EncryptedSeals"]
