"""Canonical CBOR of `(parent_hash, token_ids, extra_keys)` for many blocks at once, byte for byte cbor2's.

Flow:    token_ids[blocks, block_size] -> [CborEncoding] -> head, tail; the hashed message is head + parent + tail
Source:  RFC 8949 (section 3: heads of unsigned integers and arrays); message of vLLM v1/core/kv_cache_utils.py

An unsigned integer takes 1 byte below 24, else one of the heads 0x18, 0x19, 0x1a and 1, 2 or 4 big-endian bytes.
Tokens of 2**32 and more need 8; blocks are then encoded one by one by cbor2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import cbor2
import numpy as np

from kvjax.core.hashing.byte_packing import pack_blocks

MAX_WORD_TOKEN = 2**32 - 1  # a token above it does not fit a packed code
NONE = b"\xf6"
BYTE_STRING, ARRAY = 2, 4  # major types
_TRIPLE = b"\x83"  # array of three
JOINED_TOKENS = 256  # up to here joining codes in a plain loop is faster than packing them
_pack_2, _pack_3, _pack_5 = struct.Struct(">BB").pack, struct.Struct(">BH").pack, struct.Struct(">BI").pack


def cbor_head(major_type: int, value: int) -> bytes:
    """Head of an item with the count or value `value` >= 0, in its shortest form."""
    if value < 24:
        return bytes((major_type << 5 | value,))
    size = next(size for size in (1, 2, 4, 8) if value < 256**size)
    return bytes((major_type << 5 | 24 + size.bit_length() - 1,)) + value.to_bytes(size, "big")


class CborEncoding:
    """Canonical CBOR messages of blocks. Stateless; `tails` costs a few nanoseconds a token."""

    short_tokens: ClassVar[int] = 0  # up to here `dumps` of one message after the other is faster than `tails`

    def dumps(self, value: Any) -> bytes:
        """One value, as vLLM's `*_cbor` functions encode it."""
        return cbor2.dumps(value, canonical=True)

    def head(self, parent_len: int, tail: bytes) -> bytes:
        """Bytes before a parent hash of `parent_len` bytes."""
        return _TRIPLE + cbor_head(BYTE_STRING, parent_len)

    def heads(self, parent_len: int, tails: Sequence[bytes]) -> Iterable[bytes]:
        """`head` of every tail."""
        return repeat(_TRIPLE + cbor_head(BYTE_STRING, parent_len), len(tails))

    def tails(
        self,
        token_ids: np.ndarray,  # integer[num_blocks, block_size], not negative
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,  # one per block; None: no block has any
    ) -> list[bytes]:
        """Bytes after the parent hash, per block."""
        if token_ids.size and token_ids.dtype.itemsize > 4 and int(token_ids.max()) > MAX_WORD_TOKEN:
            tails = [cbor2.dumps(tuple(block)) + NONE for block in token_ids.tolist()]
        elif token_ids.size <= JOINED_TOKENS:
            head = cbor_head(ARRAY, token_ids.shape[1])
            tails = [head + _join_codes(block) + NONE for block in token_ids.tolist()]
        else:
            tails = pack_blocks(token_ids, cbor_head(ARRAY, token_ids.shape[1]), NONE, _code_tokens)
        encoded: dict[tuple[Any, ...], bytes] = {}  # most blocks of a request have the same keys
        for i, keys in enumerate(extra_keys or ()):
            if keys is not None:
                if keys not in encoded:
                    encoded[keys] = self.dumps(keys)
                tails[i] = tails[i][: -len(NONE)] + encoded[keys]
        return tails


def _join_codes(tokens: list[int]) -> bytes:
    """The codes of tokens of at most `MAX_WORD_TOKEN`, joined."""
    return b"".join(
        [
            _pack_5(0x1A, token)
            if token > 0xFFFF
            else _pack_3(0x19, token)
            if token > 0xFF
            else _pack_2(0x18, token)
            if token > 23
            else bytes((token,))
            for token in tokens
        ]
    )


def _code_tokens(tokens: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> None:
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
