"""The packed encodings are cbor2's and, under the same laws, pickle's own bytes."""

from __future__ import annotations

import pickle
from itertools import product

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.cbor_encoding import ARRAY, BYTE_STRING, CborEncoding, cbor_head
from kvjax.core.hashing.pickle_encoding import PickleEncoding

SIZES = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1]


def whole(encoding: CborEncoding | PickleEncoding, parent: bytes, tail: bytes) -> bytes:
    return encoding.head(len(parent), tail) + parent + tail


@pytest.mark.parametrize("value", SIZES)
def test_heads_of_integers(value: int) -> None:
    assert cbor_head(0, value) == cbor2.dumps(value)


@pytest.mark.parametrize("size", [size for size in SIZES if size <= 65_536])
def test_heads_of_strings_and_arrays(size: int) -> None:
    assert cbor2.dumps(bytes(size)) == cbor_head(BYTE_STRING, size) + bytes(size)
    assert cbor2.dumps([0] * size) == cbor_head(ARRAY, size) + bytes(size)


def test_the_bytes_that_routers_expect() -> None:
    parent = bytes(range(32))
    (tail,) = CborEncoding().tails(np.array([[1, 2, 3, 4]]))
    assert whole(CborEncoding(), parent, tail) == bytes.fromhex("835820") + parent + bytes.fromhex("8401020304f6")


@given(
    st.sampled_from([0, 1, 2, 3, 4, 40, 300]),
    st.integers(1, 40),
    st.sampled_from([8, 20, 60, 300, 70_000, 2**31, 2**32, 2**40, 2**63 - 1]),
    st.sampled_from([16, 32]),
    st.integers(0, 2**32),
)
def test_packed_messages_are_the_encoders_own(n: int, size: int, top: int, parent_len: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, rng.integers(1, top, (n, size)))
    keys = [None if rng.random() < 0.5 else (("mm", "image", -3), "s" * int(rng.integers(300))) for _ in range(n)]
    parent = rng.bytes(parent_len)
    for extra_keys in (None, keys):
        values = [(parent, tuple(b), k) for b, k in zip(blocks.tolist(), extra_keys or [None] * n, strict=True)]
        cbor, pickled = CborEncoding(), PickleEncoding()
        tails = cbor.tails(blocks, extra_keys)
        assert [whole(cbor, parent, tail) for tail in tails] == [cbor2.dumps(v, canonical=True) for v in values]
        assert list(cbor.heads(parent_len, tails)) == [cbor.head(parent_len, tail) for tail in tails]
        more = pickled.tails(blocks, extra_keys)
        assert more is not None
        assert [whole(pickled, parent, tail) for tail in more] == [pickle.dumps(v, protocol=5) for v in values]
        assert list(pickled.heads(parent_len, more)) == [pickled.head(parent_len, tail) for tail in more]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_every_integer_type_holds_tokens(dtype: type) -> None:
    top = min(np.iinfo(dtype).max, 2**63)
    blocks = np.linspace(0, float(top) * 0.99, 32).astype(dtype).reshape(4, 8)
    for encoding, copies in product((CborEncoding(), PickleEncoding()), (1, 100)):
        tails = encoding.tails(np.tile(blocks, (copies, 1)))
        assert tails is not None
        parent = bytes(32)
        assert tails == tails[:4] * copies
        tails = tails[:4]
        values = [(parent, tuple(block), None) for block in blocks.tolist()]
        assert [whole(encoding, parent, tail) for tail in tails] == [encoding.dumps(value) for value in values]
