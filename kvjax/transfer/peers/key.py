"""The secret that the processes of one service share: it signs tickets, and lets peers prove themselves.

Flow:    32 random bytes, given to every process -> [TransferKey] -> codes of tickets, certificates of connections
Source:  RFC 2104 (HMAC), RFC 5869 (one secret, a key for each purpose)
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

MIN_BYTES = 32
VARIABLE = "KVJAX_TRANSFER_KEY"


class TransferKey:
    """A shared secret. Whoever has it may offer KV to every process that has it, and take what those offer."""

    def __init__(self, secret: bytes) -> None:
        """A key of these bytes.

        Raises:
            ValueError: they are fewer than 32.
        """
        if not isinstance(secret, bytes) or len(secret) < MIN_BYTES:
            size = len(secret) if isinstance(secret, bytes) else type(secret).__name__
            raise ValueError(
                f"expected at least {MIN_BYTES} secret bytes, got {size}; make a key with "
                "`python -c 'import secrets; print(secrets.token_hex(32))'`"
            )
        self._secret = hashlib.sha256(secret).digest()

    @classmethod
    def generate(cls) -> TransferKey:
        """A new random key, for peers of this process alone."""
        return cls(secrets.token_bytes(MIN_BYTES))

    @classmethod
    def from_environment(cls, variable: str = VARIABLE) -> TransferKey:
        """The key whose hexadecimal digits an environment variable holds.

        Raises:
            ValueError: the variable is not set, or holds no key.
        """
        if variable not in os.environ:
            raise ValueError(f"expected a key of at least {2 * MIN_BYTES} hexadecimal digits in ${variable}, got none")
        return cls(_from_hex(os.environ[variable], f"${variable}"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TransferKey:
        """The key whose hexadecimal digits a file holds.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no key, or others than its owner may read it.
        """
        file = Path(path)
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            raise ValueError(
                f"expected a key file that its owner alone may read, got mode {mode:04o}; chmod 600 {file}"
            )
        return cls(_from_hex(file.read_bytes().decode("ascii", "replace"), str(file)))

    def of(self, purpose: str) -> bytes:
        """32 bytes that stand for the key in one use; they tell nothing of it."""
        return hmac.digest(self._secret, f"kvjax.transfer {purpose}".encode(), "sha256")

    def sign(self, purpose: str, data: bytes) -> bytes:
        """The authentication code of `data`, 32 bytes."""
        return hmac.digest(self.of(purpose), data, "sha256")

    def signed(self, purpose: str, data: bytes, code: bytes) -> bool:
        """Whether `code` is that of `data`; takes as long whatever it is."""
        return hmac.compare_digest(self.sign(purpose, data), code)

    def __repr__(self) -> str:
        return "TransferKey(...)"


def _from_hex(text: str, place: str) -> bytes:
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError(f"expected a key of hexadecimal digits in {place}, got other text") from None


__all__ = ["TransferKey"]
