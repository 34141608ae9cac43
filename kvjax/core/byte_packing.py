"""Variable-length codes packed into one byte string per row, for many rows at once.

Flow:    codes and lengths (cbor_encoding, pickle_encoding) -> [pack_rows] -> list[bytes]

Every code is a little-endian uint64 whose bytes beyond its length are zero. All are stored as whole words, each over
the tail of the one before it, into rows of a fixed stride; numpy then cuts the rows at their trailing zeros. So the
last byte of the last code of a row must not be zero.
"""

from __future__ import annotations

import numpy as np

WORD_BYTES = 8


def pack_rows(
    codes: np.ndarray,  # uint64[num_codes, num_rows]
    lengths: np.ndarray,  # unsigned[num_codes, num_rows] bytes of each code, 1 to 8
    max_row_bytes: int,
) -> list[bytes]:
    """The concatenation of `codes[:, row]` for every row; no row is longer than `max_row_bytes`."""
    num_codes, num_rows = codes.shape
    stride = -(-(max_row_bytes + WORD_BYTES) // WORD_BYTES) * WORD_BYTES  # the last word never reaches the next row
    buffer = np.zeros(num_rows * stride, np.uint8)
    words = np.ndarray((num_rows * stride - WORD_BYTES + 1,), "<u8", buffer, 0, (1,))  # a word at every byte offset
    offsets = np.empty((num_codes, num_rows), np.int64)
    offsets[0] = np.arange(0, num_rows * stride, stride)
    np.cumsum(lengths[:-1], axis=0, out=offsets[1:])
    offsets[1:] += offsets[0]
    words[offsets.ravel()] = codes.ravel()  # in this order: code k of a row before its code k + 1
    return buffer.view(f"S{stride}").tolist()
