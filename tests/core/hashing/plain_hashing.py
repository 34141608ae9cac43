"""The meaning of block hashes in the fewest lines: plain encoders and digests, block by block."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import cbor2
import xxhash

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def encode(algorithm: str, value: Any) -> bytes:
    if algorithm.endswith("_cbor"):
        return cbor2.dumps(value, canonical=True)
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def digest(algorithm: str, message: bytes) -> bytes:
    if algorithm.startswith("sha256"):
        return hashlib.sha256(message).digest()
    return xxhash.xxh3_128(message).digest()


def hash_value(algorithm: str, value: Any) -> bytes:
    return digest(algorithm, encode(algorithm, value))


def plain_hashes(
    algorithm: str,
    parent: bytes,
    tokens: Sequence[int],
    block_size: int,
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
) -> list[bytes]:
    hashes = []
    for i in range(len(tokens) // block_size):
        block = tuple(int(token) for token in tokens[i * block_size : (i + 1) * block_size])
        parent = hash_value(algorithm, (parent, block, extra_keys[i] if extra_keys else None))
        hashes.append(parent)
    return hashes
