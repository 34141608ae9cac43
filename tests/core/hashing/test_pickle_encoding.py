"""Where the pickled form stops being cut from frames; its bytes are tested beside CBOR's."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvjax.core.hashing.pickle_encoding import MAX_TAIL_BYTES, PickleEncoding


@pytest.mark.parametrize("size", [MAX_TAIL_BYTES // 5, MAX_TAIL_BYTES // 5 + 1, MAX_TAIL_BYTES])
def test_a_pickle_is_cut_only_within_a_frame(size: int) -> None:
    blocks = np.full((1, size), 100_000)
    tails = PickleEncoding().tails(blocks)
    assert tails is None  # 5 bytes a token and what surrounds them
    small = PickleEncoding().tails(blocks[:, : MAX_TAIL_BYTES // 5 - 2])
    assert small is not None
    assert PickleEncoding().head(16, small[0]) + bytes(16) + small[0] == pickle.dumps(
        (bytes(16), tuple(blocks[0, : MAX_TAIL_BYTES // 5 - 2].tolist()), None), protocol=5
    )


@pytest.mark.parametrize("shared", [True, False])
def test_an_object_met_twice_is_a_reference(shared: bool) -> None:
    """As in vLLM: equal extra keys of other identities may hash differently, so the objects given are pickled."""
    name = "adapter name"
    path = name if shared else "".join(["adapter", " name"])
    blocks, keys = np.array([[1, 2, 3, 4]]), [(("lora", name, path),)]
    tails = PickleEncoding().tails(blocks, keys)
    assert tails is not None
    message = pickle.dumps((bytes(32), (1, 2, 3, 4), keys[0]), protocol=5)
    assert PickleEncoding().head(32, tails[0]) + bytes(32) + tails[0] == message
