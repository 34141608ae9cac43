"""The infinite cache against the definition: the longest prefix of tokens shared with any earlier prompt."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.replay import TraceRequest
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from tests.replay.random_traces import random_trace


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(a.size, b.size)
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if differs.size else length


@pytest.mark.parametrize("hash_block_size", [16, 512])
@pytest.mark.parametrize("block_size", [1, 16, 48, 512, 1024])
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_tokens_themselves(seed: int, block_size: int, hash_block_size: int) -> None:
    cache = InfiniteCache(block_size)
    earlier: list[np.ndarray] = []
    for request in random_trace(seed, 60, hash_block_size=hash_block_size):
        tokens = request.token_ids()
        shared = max((shared_prefix(tokens, other) for other in earlier), default=0)
        expected = min(shared, request.input_length - 1) // block_size * block_size
        assert cache.lookup_and_add(request) == expected
        earlier.append(tokens)


def test_a_repeated_prompt_computes_its_last_block() -> None:
    cache = InfiniteCache(16)
    request = TraceRequest(0, 1024, 1, (0, 1))
    assert [cache.lookup_and_add(request) for _ in range(2)] == [0, 1008]
