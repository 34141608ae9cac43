"""Every constraint of a kind is an error that names what was expected and got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvjax.core import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.core.kinds.unshared import RequestBufferSpec

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
CHUNKED = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8, **HEADS)
SINKS = SinkFullAttentionSpec(block_size=4, sink_len=8, **HEADS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindowSpec(block_size=4, sliding_window=0, **HEADS), "expected sliding_window >= 1, got 0"),
        (
            lambda: SlidingWindowSpec(block_size=4, sliding_window=8, num_sink_tokens=-1, **HEADS),
            "expected num_sink_tokens >= 0, got -1",
        ),
        (lambda: RSWASpec(block_size=4, rswa_window=0, **HEADS), "expected rswa_window >= 1, got 0"),
        (
            lambda: SlidingWindowMLASpec(block_size=4, head_size=8, dtype="float32", sliding_window=0),
            "expected sliding_window >= 1, got 0",
        ),
        (
            lambda: ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=0, **HEADS),
            "expected attention_chunk_size >= 1, got 0",
        ),
        (
            lambda: SinkFullAttentionSpec(block_size=4, sink_len=6, **HEADS),
            "expected sink_len to be a positive multiple of the block size 4, got 6",
        ),
        (
            lambda: SinkFullAttentionSpec(block_size=4, sink_len=0, **HEADS),
            "expected sink_len to be a positive multiple of the block size 4, got 0",
        ),
        (
            lambda: MLAAttentionSpec(block_size=4, head_size=8, dtype="float32", tokens_per_state=3),
            "expected tokens_per_state to divide the block size 4, got 3",
        ),
        (lambda: MLAAttentionSpec(block_size=4, head_size=0, dtype="float32"), "expected head_size >= 1, got 0"),
        (lambda: MLAAttentionSpec(block_size=4, head_size=8, dtype="int3"), "expected a KV-cache dtype"),
        (
            lambda: RequestBufferSpec(block_size=4, num_bytes=8, num_speculative_blocks=1),
            "expected mamba_cache_mode none and no speculative blocks of a buffer, got none and 1",
        ),
    ],
)
def test_specs_that_can_not_be(make: Callable[[], KVCacheSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (
            CHUNKED,
            {"use_eagle": True},
            NotImplementedError,
            "does not work with use_eagle=True",
        ),
        (
            CHUNKED,
            {"dcp_world_size": 2},
            NotImplementedError,
            r"chunked_local_attention attention does not work with context parallelism, .*= 2; expected 1",
        ),
        (
            SINKS,
            {"dcp_world_size": 2, "pcp_world_size": 2},
            ValueError,
            "expected sink_len to be a multiple of the 16 tokens of a block over all ranks .*, got 8",
        ),
        (
            SlidingWindowSpec(block_size=4, sliding_window=8, num_sink_tokens=2, **HEADS),
            {"sub_block_hits": True, "same_step_hits": False},
            NotImplementedError,
            "group 0: windows with num_sink_tokens > 0 work neither with a tier nor with sub_block_hits",
        ),
        (
            CHUNKED,
            {"hash_block_size": 3},
            ValueError,
            "expected hash_block_size to divide the block size",
        ),
    ],
)
def test_options_that_a_kind_can_not_have(
    spec: KVCacheSpec, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KVCacheManager(KVCacheConfig.single_pool(10, spec), 64, **({"hash_block_size": 4} | options))


def test_a_pool_too_small_for_its_sinks() -> None:
    with pytest.raises(ValueError, match=r"expected a pool with 4 free blocks for the sinks of groups \(0, 1\), got 3"):
        KVCacheManager(KVCacheConfig.single_pool(4, SINKS, SINKS), 64, 4)
