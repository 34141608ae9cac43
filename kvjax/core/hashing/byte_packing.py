"""Rows of small integers, each integer encoded in a few bytes, as one byte string per row, for many rows at once.

Flow:    token_ids[blocks, block_size] (cbor_encoding, pickle_encoding) -> [pack_blocks] -> list[bytes]

Every code is a little-endian uint64 whose bytes beyond its length are zero. It is stored as a whole word over the tail
of the code before it, into rows of a fixed stride; numpy then cuts each row at its trailing zeros. So what follows the
last token must not end with a zero byte. Rows are packed in chunks whose arrays stay in the processor's cache and in
reused memory: fresh pages cost as much as the packing itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

WORD_BYTES = 8
MAX_TOKEN_BYTES = 5  # a head or opcode and four bytes
CHUNK_CODES = 10_240  # 80 KiB of codes

# Writes the code and its length for every token: (uint32[k, n], uint64[k, n], uint8[k, n]).
TokenCoder = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def pack_blocks(token_ids: np.ndarray, before: bytes, after: bytes, code_tokens: TokenCoder) -> list[bytes]:
    """`before`, the codes of a block's tokens, `after`, joined, for every block of integer[num_blocks, block_size].

    `before` and `after` have 1 to 8 bytes and `after` does not end with a zero.
    """
    rows = max(1, CHUNK_CODES // (token_ids.shape[1] + 2))
    packed: list[bytes] = []
    for start in range(0, len(token_ids), rows):
        packed += _pack_chunk(token_ids[start : start + rows], before, after, code_tokens)
    return packed


def _pack_chunk(token_ids: np.ndarray, before: bytes, after: bytes, code_tokens: TokenCoder) -> list[bytes]:
    num_rows, num_tokens = token_ids.shape
    tokens = np.ascontiguousarray(token_ids.T, dtype=np.uint32)  # token k of all rows side by side
    codes = np.empty(tokens.shape, np.uint64)
    lengths = np.empty(tokens.shape, np.uint8)
    code_tokens(tokens, codes, lengths)
    max_bytes = len(before) + MAX_TOKEN_BYTES * num_tokens + len(after)
    stride = -(-(max_bytes + WORD_BYTES) // WORD_BYTES) * WORD_BYTES  # the last word never reaches the next row
    buffer = np.zeros(num_rows * stride, np.uint8)
    words = np.ndarray((buffer.size - WORD_BYTES + 1,), "<u8", buffer, 0, (1,))  # the word at every byte offset
    offsets = np.empty((num_tokens + 1, num_rows), np.int64)
    offsets[0] = np.arange(len(before), buffer.size, stride)
    offsets[1:] = lengths
    np.add.accumulate(offsets, axis=0, out=offsets)
    buffer.reshape(num_rows, stride)[:, : len(before)] = np.frombuffer(before, np.uint8)
    words[offsets[:-1].ravel()] = codes.ravel()  # in this order: token k of a row before its token k + 1
    words[offsets[-1]] = int.from_bytes(after, "little")
    return buffer.view(f"S{stride}").tolist()
