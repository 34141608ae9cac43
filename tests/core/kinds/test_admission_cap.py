"""The admission cap is what a request can hold at once: never less, and at most two blocks more."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvjax.core import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheManager, KVCacheSpec, SlidingWindowSpec

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
MAX_MODEL_LEN = 24


def specs(block_size: int) -> list[KVCacheSpec]:
    sizes = range(1, 12)
    windows = [SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS) for size in sizes]
    chunks = [ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **HEADS) for size in sizes]
    kept = [replace(spec, num_sink_tokens=num) for spec, num in zip(windows, [1, 2, 3, 7, 20] * 3, strict=False)]
    return [*windows, *chunks, *kept]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6])
def test_the_cap_is_the_most_blocks_that_a_step_can_need(block_size: int) -> None:
    for spec, in_flight in product(specs(block_size), (1, 2, 5, 9, MAX_MODEL_LEN)):
        config = KVCacheConfig.single_pool(2, spec)
        manager = KVCacheManager(config, MAX_MODEL_LEN, block_size, max_in_flight_tokens=in_flight)
        [kind] = manager.groups.managers
        most = 0
        for settled in range(MAX_MODEL_LEN):
            slots = min(settled + in_flight, MAX_MODEL_LEN)
            skipped = kind.get_num_skipped_tokens(settled) // block_size
            released = max(skipped - -(-spec.num_sink_tokens // block_size), 0)
            most = max(most, -(-slots // block_size) - released)
        assert most <= kind.max_admission_blocks <= most + 2, (spec, in_flight)
