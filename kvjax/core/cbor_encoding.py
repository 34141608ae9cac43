"""Canonical CBOR of `(parent_hash, token_ids, extra_keys)` for many blocks at once, byte for byte cbor2's.

Flow:    token_ids[blocks, block_size] -> [CborEncoding] -> head, tail; the hashed message is head + parent + tail
Source:  RFC 8949 (section 3: heads of unsigned integers and arrays); message of vLLM v1/core/kv_cache_utils.py

An unsigned integer takes 1 byte below 24, else one of the heads 0x18, 0x19, 0x1a and 1, 2 or 4 big-endian bytes.
Tokens of 2**32 and more need 8; blocks are then encoded one by one by cbor2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cbor2
import numpy as np

from kvjax.core.byte_packing import pack_rows

MAX_WORD_TOKEN = 2**32 - 1  # a token above it does not fit a packed code
NONE = b"\xf6"
_TRIPLE = b"\x83"


def cbor_head(major_type: int, value: int) -> bytes:
    """Head of an item of `major_type` (0 unsigned, 2 bytes, 4 array) with the count or value `value`."""
    encoded = bytearray(cbor2.dumps(value))
    encoded[0] |= major_type << 5
    return bytes(encoded)


class CborEncoding:
    """Canonical CBOR messages of blocks. Stateless; `tails` costs a few nanoseconds a token."""

    def dumps(self, value: Any) -> bytes:
        """One value, as vLLM's `*_cbor` functions encode it."""
        return cbor2.dumps(value, canonical=True)

    def head(self, parent_len: int, tail: bytes) -> bytes:
        """Bytes before a parent hash of `parent_len` bytes."""
        return _TRIPLE + cbor_head(2, parent_len)

    def tails(
        self,
        token_ids: np.ndarray,  # integer[num_blocks, block_size], not negative
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,  # one per block; None: no block has any
    ) -> list[bytes]:
        """Bytes after the parent hash, per block."""
        if token_ids.size and token_ids.dtype.itemsize > 4 and int(token_ids.max()) > MAX_WORD_TOKEN:
            tails = [cbor2.dumps(tuple(block)) + NONE for block in token_ids.tolist()]
        else:
            tails = _packed_tails(token_ids)
        if extra_keys is None:
            return tails
        return [
            tail if keys is None else tail[: -len(NONE)] + self.dumps(keys)
            for tail, keys in zip(tails, extra_keys, strict=True)
        ]


def _packed_tails(token_ids: np.ndarray) -> list[bytes]:
    """Array head, tokens and the null of no extra keys, for every block at once."""
    num_blocks, block_size = token_ids.shape
    array_head = cbor_head(4, block_size)
    codes = np.empty((block_size + 2, num_blocks), np.uint64)
    lengths = np.empty((block_size + 2, num_blocks), np.uint8)
    codes[0], lengths[0] = int.from_bytes(array_head, "little"), len(array_head)
    codes[-1], lengths[-1] = NONE[0], len(NONE)
    _token_codes(np.ascontiguousarray(token_ids.T, dtype=np.uint32), codes[1:-1], lengths[1:-1])
    return pack_rows(codes, lengths, len(array_head) + 5 * block_size + len(NONE))


def _token_codes(tokens: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> None:
    """Writes the code and the length of every token."""
    above_23 = (tokens > 23).view(np.uint8)
    above_255 = (tokens > 0xFF).view(np.uint8)
    above_65535 = (tokens > 0xFFFF).view(np.uint8)
    np.add(above_65535, above_65535, out=lengths)
    lengths += above_23
    lengths += above_255  # bytes after the head: 0, 1, 2, 4; a value below 24 is its own head
    codes[...] = tokens.byteswap()  # the value's big-endian bytes, first byte lowest, zeros in front
    codes <<= 8
    codes >>= 32 - 8 * lengths
    codes |= 0x18 * above_23 + above_255 + above_65535
    lengths += 1
