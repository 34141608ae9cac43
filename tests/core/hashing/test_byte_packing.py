"""Packing equals joining the codes of each row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.byte_packing import pack_blocks


@given(st.integers(0, 2_000), st.integers(1, 9), st.binary(min_size=1, max_size=8), st.binary(max_size=7))
def test_rows_are_packed_in_order(num_rows: int, size: int, before: bytes, after: bytes) -> None:
    after += b"."

    def code_bytes(tokens: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> None:
        lengths[...] = 1 + tokens % 5
        kept = (np.uint64(1) << (8 * lengths.astype(np.uint64))) - np.uint64(1)
        codes[...] = (np.uint64(0x0102030405) + tokens // 5) & kept

    tokens = np.random.default_rng(num_rows).integers(0, 50, (num_rows, size))
    expected = [
        before + b"".join((0x0102030405 + t // 5).to_bytes(8, "little")[: 1 + t % 5] for t in row) + after
        for row in tokens.tolist()
    ]
    assert pack_blocks(tokens, before, after, code_bytes) == expected
