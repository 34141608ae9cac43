"""Laws of the plan: the published worked example, budgets, ids, parallelism, and every refused argument."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import MemoryBudgetError
from kvjax.planning import plan_kv_cache

GIB = 2**30


def full(num_kv_heads: int = 8, head_size: int = 128, block_size: int = 16, dtype: str = "bfloat16") -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)


def window(size: int = 1024, num_kv_heads: int = 8, head_size: int = 128, block_size: int = 16) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype="bfloat16", sliding_window=size
    )


def layers(*runs: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Runs of (count, spec) as layers in order."""
    specs = [spec for count, spec in runs for _ in range(count)]
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


def test_worked_example_of_80_layers_in_56_gib() -> None:
    plan = plan_kv_cache(layers((80, full())), memory_bytes=56 * GIB, max_model_len=131_072)
    (pool,) = plan.pools
    assert plan.groups[0].page_bytes == 65_536
    assert pool.bytes_per_block == 80 * 65_536
    assert pool.num_blocks == 11_468
    assert round(plan.concurrency, 1) == 1.4
    # 10,937 comes out where 56 GiB is read as 56,000 MB and 80 pages of 64 KiB as 5.12 MB.
    assert 56_000 * 100 // 512 == 10_937


def test_config_holds_what_the_plan_says() -> None:
    plan = plan_kv_cache(layers((4, full())), num_blocks=64, max_model_len=256)
    assert plan.config.pools[0].num_blocks == 64
    assert len(plan.config.pools[0].columns) == 4
    assert plan.config.pools[0].bytes_per_block == plan.pools[0].bytes_per_block
    assert plan.config.kv_cache_groups[0].layer_names == tuple(f"layers.{i}" for i in range(4))
    assert plan.used_bytes == 64 * 4 * 65_536
    assert plan.unused_bytes == 0


@given(memory_bytes=st.integers(10 * 2**20, 10 * 2**30), num_layers=st.integers(1, 12))
def test_one_pool_takes_every_whole_block_of_the_budget(memory_bytes: int, num_layers: int) -> None:
    plan = plan_kv_cache(layers((num_layers, full())), memory_bytes=memory_bytes, max_model_len=16)
    assert plan.pools[0].num_blocks == memory_bytes // (num_layers * 65_536)
    assert 0 <= plan.unused_bytes < num_layers * 65_536


@given(
    memory_bytes=st.integers(2 * GIB, 40 * GIB),
    num_full=st.integers(1, 8),
    num_window=st.integers(1, 8),
    heads=st.sampled_from([1, 2, 16]),
    max_model_len=st.integers(1, 20_000),
)
def test_several_pools_share_the_budget_so_that_none_runs_dry_first(
    memory_bytes: int, num_full: int, num_window: int, heads: int, max_model_len: int
) -> None:
    specs = layers((num_full, full()), (num_window, window(num_kv_heads=heads)))
    lengths = {"max_model_len": max_model_len, "request_len": max_model_len, "max_in_flight_tokens": 512}
    plan = plan_kv_cache(specs, memory_bytes=memory_bytes, **lengths)
    growing, bounded = plan.pools
    assert plan.used_bytes <= memory_bytes
    assert plan.unused_bytes < growing.bytes_per_block
    assert plan.concurrency >= 1
    # What the windows do not use would not hold them for one more step of the larger c.
    requests = (bounded.num_blocks - 1 - bounded.in_flight_blocks) / bounded.request_blocks
    more = requests + 1 / bounded.request_blocks
    next_blocks = [
        1 + pool.in_flight_blocks + math.ceil(more * pool.request_blocks - 1e-9) for pool in (growing, bounded)
    ]
    assert next_blocks[0] * growing.bytes_per_block + next_blocks[1] * bounded.bytes_per_block > memory_bytes


def test_shortfall_is_named_in_bytes() -> None:
    one_request = (1 + 8_192) * 80 * 65_536
    with pytest.raises(
        MemoryBudgetError, match=rf"{one_request:,} bytes \(.*\), got {one_request - 5:,} \(40.00 GiB\): 5 bytes short"
    ):
        plan_kv_cache(layers((80, full())), memory_bytes=one_request - 5, max_model_len=131_072)
    plan = plan_kv_cache(layers((80, full())), memory_bytes=one_request, max_model_len=131_072)
    assert plan.concurrency == 1


@given(
    counts=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    platform=st.sampled_from(["cpu", "tpu"]),
    num_blocks=st.integers(20, 99),
)
def test_bytes_are_those_of_the_arrays(counts: list[int], platform: str, num_blocks: int) -> None:
    kinds = (full(), full(2), window(64), window(128, 2))
    specs = layers(*zip(counts, kinds, strict=True))
    plan = plan_kv_cache(specs, num_blocks=num_blocks, max_model_len=16, platform=platform)
    arrays = [array for pool in plan.config.pools for column in pool.columns for array in column.arrays]
    assert plan.used_bytes == sum(array.page_bytes for array in arrays) * num_blocks
    assert [len(pool.columns) for pool in plan.config.pools] == [pool.num_columns for pool in plan.pools]


def test_longer_requests_fit_less_often() -> None:
    plan = plan_kv_cache(layers((4, full()), (20, window())), memory_bytes=GIB, max_model_len=8_192)
    fits = [plan.requests_of(length) for length in (1, 16, 1024, 4096, 8192)]
    assert fits == sorted(fits, reverse=True)
    assert fits[-1] == plan.concurrency
    assert plan.resident_tokens == int(plan.concurrency * 8_192)


def test_windows_hold_less_than_full_attention() -> None:
    specs = layers((4, full()), (20, window()))
    arguments = {"memory_bytes": 8 * GIB, "max_model_len": 32_768, "max_in_flight_tokens": 2_048}
    assert (
        plan_kv_cache(specs, **arguments).concurrency > 2 * plan_kv_cache(specs, hybrid=False, **arguments).concurrency
    )


def test_tokens_in_flight_are_set_aside_once() -> None:
    specs = layers((1, window(size=1024)))
    plan = plan_kv_cache(specs, num_blocks=10_000, max_model_len=100_000, max_in_flight_tokens=8_192)
    assert plan.pools[0].in_flight_blocks == 8_192 // 16
    assert plan.pools[0].request_blocks == 1024 // 16 + 1


def test_a_shortfall_is_named_in_blocks() -> None:
    specs = layers((4, full()), (1, window()))  # one pool of five groups of a layer; 8,192 tokens are in flight
    one_request = 1 + 4 * 1_024 + math.ceil((1_023 + 8_192) / 16) + 1
    words = (
        f"needs {one_request:,} blocks of pool 0 .*, got 4,600: {one_request - 4_600} blocks short; give more blocks, "
        r"plan for shorter requests, .*\. The longest request that fits has 16,080 tokens"
    )
    with pytest.raises(MemoryBudgetError, match=words):
        plan_kv_cache(specs, num_blocks=4_600, max_model_len=16_384)
    assert plan_kv_cache(specs, num_blocks=one_request, max_model_len=16_384).concurrency == 1
    with pytest.raises(MemoryBudgetError, match=r"got 5: 2 blocks short; .* No request fits with 64 tokens in flight"):
        plan_kv_cache(specs, num_blocks=5, max_model_len=16, max_in_flight_tokens=64)


def test_each_pool_of_given_blocks_must_hold_a_request() -> None:
    specs = layers((2, full()), (2, window(num_kv_heads=1)))
    with pytest.raises(MemoryBudgetError, match=r"needs 6 blocks of pool 1 .* got 4: 2 blocks short"):
        plan_kv_cache(specs, num_blocks=(64, 4), max_model_len=64)


def test_tensor_parallelism_splits_heads_and_replicates_the_rest() -> None:
    split = plan_kv_cache(layers((4, full(8))), num_blocks=8, max_model_len=64, tensor_parallel=4)
    assert split.pools[0].bytes_per_block == 4 * 65_536 // 4
    assert split.config.pools[0].columns[0].arrays[0].page_shape == (16, 8, 128)
    copied = plan_kv_cache(layers((4, full(2))), num_blocks=8, max_model_len=64, tensor_parallel=8)
    assert copied.pools[0].bytes_per_block == 4 * 65_536 // 8
    assert copied.config.pools[0].columns[0].arrays[0].page_shape == (16, 8, 128)
    with pytest.raises(ValueError, match="tensor_parallel to divide the 8 KV heads or to be a multiple of them, got 3"):
        plan_kv_cache(layers((4, full(8))), num_blocks=8, max_model_len=64, tensor_parallel=3)


@pytest.mark.parametrize(("heads", "tensor"), [(1, 1), (8, 8), (2, 8)])
def test_one_head_of_8_bits_a_device_takes_half_of_the_bytes(heads: int, tensor: int) -> None:
    """On TPU, whether a layer has one head or its heads split to one; what is counted is what the arrays have."""
    plans = {}
    for dtype in ("bfloat16", "int8"):
        specs = layers((3, full(heads, dtype=dtype)))
        plans[dtype] = plan_kv_cache(specs, num_blocks=8, max_model_len=64, platform="tpu", tensor_parallel=tensor)
    assert 2 * plans["int8"].used_bytes == plans["bfloat16"].used_bytes == 2 * 8 * 3 * 16 * 256
    assert plans["int8"].config.pools[0].bytes_per_block == tensor * plans["int8"].pools[0].bytes_per_block
    assert plans["int8"].groups[0].real_page_bytes == plans["int8"].groups[0].page_bytes


def test_padding_of_tpu_pages_is_counted() -> None:
    narrow = layers((2, full(num_kv_heads=8, head_size=64)))
    plan = plan_kv_cache(narrow, num_blocks=8, max_model_len=64, platform="tpu")
    assert plan.groups[0].real_page_bytes == 32_768
    assert plan.groups[0].page_bytes == 65_536
    assert plan.pools[0].bytes_per_block == 2 * plan.pools[0].real_bytes_per_block


def test_blocks_may_be_given_per_pool() -> None:
    specs = layers((2, full()), (2, window(num_kv_heads=1)))
    plan = plan_kv_cache(specs, num_blocks=(64, 32), max_model_len=64)
    assert [pool.num_blocks for pool in plan.pools] == [64, 32]
    with pytest.raises(ValueError, match="expected num_blocks for 2 pools, got 1 numbers"):
        plan_kv_cache(specs, num_blocks=[64], max_model_len=64)


def test_block_tables_are_counted() -> None:
    plan = plan_kv_cache(layers((4, full()), (20, window())), num_blocks=64, max_model_len=100)
    assert plan.table_bytes_per_request == len(plan.groups) * 4 * 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 64}, "expected one of memory_bytes and num_blocks, got none"),
        ({"max_model_len": 64, "memory_bytes": 1, "num_blocks": 2}, "memory_bytes and num_blocks, got both"),
        ({"max_model_len": 0, "num_blocks": 2}, "expected max_model_len >= 1, got 0"),
        ({"max_model_len": 64, "num_blocks": 2, "max_in_flight_tokens": 0}, "max_in_flight_tokens >= 1, got 0"),
        ({"max_model_len": 64, "num_blocks": 2, "tensor_parallel": 0}, "expected tensor_parallel >= 1, got 0"),
        ({"max_model_len": 64, "memory_bytes": 0}, "expected memory_bytes >= 1, got 0"),
        ({"max_model_len": 64, "num_blocks": 1}, "expected num_blocks >= 2"),
        ({"max_model_len": 64, "num_blocks": 2, "one_memory": True}, "expected memory_bytes with one_memory=True"),
        ({"max_model_len": 64, "num_blocks": 2**28}, r"expected at most 2,147,483,648 slots .* got 268,435,456 blocks"),
        ({"max_model_len": 64, "num_blocks": 2, "platform": "abacus"}, "expected platform 'cpu', 'gpu' or 'tpu'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_kv_cache(layers((1, full())), **arguments)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the spec of at least one layer, got none"):
        plan_kv_cache({}, num_blocks=2, max_model_len=64)


@pytest.mark.parametrize("length", [0, 65])
def test_lengths_beyond_the_plan_are_refused(length: int) -> None:
    plan = plan_kv_cache(layers((1, full())), num_blocks=64, max_model_len=64)
    with pytest.raises(ValueError, match=rf"expected a length in \[1, 64\] \(max_model_len\), got {length}"):
        plan.requests_of(length)
