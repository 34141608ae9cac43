"""Laws of lengths: the longest request is the longest, and pools are balanced for the usual one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.core import SinkFullAttentionSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import MemoryBudgetError
from kvjax.planning import CacheShape, Parallelism, plan_kv_cache
from kvjax.planning.sizing import least_bytes
from kvjax.planning.summary import KERNEL_SCALAR_BYTES, SCALAR_MEMORY_BYTES
from tests.planning.test_plan import GIB, full, layers, window

KINDS = st.sampled_from([full(), full(2), window(64), window(300, 2)])


def shape_of(specs: dict[str, KVCacheSpec]) -> CacheShape:
    return CacheShape.of(specs, platform="cpu", parallel=Parallelism())


@settings(max_examples=60)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=6),
    memory_bytes=st.integers(2**20, 2**30),
    limit=st.integers(1, 60_000),
    in_flight=st.integers(1, 2_000),
)
def test_the_longest_request_fits_and_one_token_more_does_not(
    kinds: list[KVCacheSpec], memory_bytes: int, limit: int, in_flight: int
) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(kinds)}
    arguments = {"memory_bytes": memory_bytes, "max_in_flight_tokens": in_flight}
    longest = shape_of(specs).longest_request(memory_bytes, limit, in_flight)
    assert 0 <= longest <= limit
    if longest:
        assert plan_kv_cache(specs, max_model_len=longest, **arguments).concurrency >= 1
    if longest < limit:
        with pytest.raises(MemoryBudgetError, match="bytes short"):
            plan_kv_cache(specs, max_model_len=longest + 1, **arguments)


@settings(max_examples=60)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=6),
    sizes=st.lists(st.integers(8, 3_000), min_size=6, max_size=6),  # as many pools as kinds at most
    limit=st.integers(1, 60_000),
    in_flight=st.integers(1, 2_000),
)
def test_given_blocks_hold_the_longest_request_and_not_one_token_more(
    kinds: list[KVCacheSpec], sizes: list[int], limit: int, in_flight: int
) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(kinds)}
    shape = shape_of(specs)
    arguments = {"num_blocks": sizes[: shape.num_pools], "max_in_flight_tokens": in_flight}
    longest = shape.longest_request_in(sizes[: shape.num_pools], limit, in_flight)
    assert 0 <= longest <= limit
    if longest:
        assert plan_kv_cache(specs, max_model_len=longest, **arguments).concurrency >= 1
    if longest < limit:
        with pytest.raises(MemoryBudgetError, match=r"blocks? short"):
            plan_kv_cache(specs, max_model_len=longest + 1, **arguments)


def test_the_shortfall_names_the_longest_request_that_fits() -> None:
    specs = layers((80, full()))
    block = 80 * 65_536
    with pytest.raises(MemoryBudgetError, match=r"in flight\. The longest request that fits has 1,600 tokens"):
        plan_kv_cache(specs, memory_bytes=101 * block, max_model_len=2_000)
    with pytest.raises(MemoryBudgetError, match=r"No request fits with 8,192 tokens in flight"):
        plan_kv_cache(specs, memory_bytes=block, max_model_len=2_000)


def test_pools_are_balanced_for_the_usual_request() -> None:
    """Full layers and windows in pools of their own, 8 GiB: planned for 128k tokens a request, the windows' pool holds
    few requests however short they are; planned for 2k tokens many more fit, and one of 128k still does.
    """
    specs = layers((4, full()), (40, window(num_kv_heads=1)))
    arguments = {"memory_bytes": 8 * GIB, "max_model_len": 131_072, "max_in_flight_tokens": 2_048}
    longest, usual = (plan_kv_cache(specs, request_len=length, **arguments) for length in (131_072, 2_048))
    assert longest.requests_of(2_048) < 5 < 80 < usual.requests_of(2_048)
    assert 1 <= usual.concurrency < longest.concurrency
    assert usual.used_bytes <= usual.memory_bytes


@given(
    spare_bytes=st.integers(0, 2**28),
    max_model_len=st.integers(1, 20_000),
    share=st.floats(0.001, 1),
    heads=st.sampled_from([1, 2, 16]),
)
def test_one_longest_request_always_fits(spare_bytes: int, max_model_len: int, share: float, heads: int) -> None:
    """However short the usual request is, and however little memory there is beside that of the longest."""
    specs = layers((3, full()), (3, window(num_kv_heads=heads)))
    least = least_bytes(shape_of(specs).needs(max_model_len, max_model_len, 512))
    plan = plan_kv_cache(
        specs,
        memory_bytes=least + spare_bytes,
        max_model_len=max_model_len,
        request_len=max(int(share * max_model_len), 1),
        max_in_flight_tokens=512,
    )
    assert plan.concurrency >= 1
    assert plan.unused_bytes >= 0
    assert plan.requests_of(plan.load.tokens_per_checkpoint) >= plan.concurrency


@pytest.mark.parametrize("length", [0, 65])
def test_usual_lengths_beyond_the_longest_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"expected request_len in \[1, 64\] \(max_model_len\), got {length}"):
        plan_kv_cache(layers((1, full())), num_blocks=64, max_model_len=64, request_len=length)


def test_sinks_are_set_aside_once() -> None:
    sinks = SinkFullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", sink_len=64)
    plan = plan_kv_cache(layers((2, sinks), (4, window(64))), num_blocks=100, max_model_len=160)
    assert (plan.pools[0].reserved_blocks, plan.pools[0].request_blocks) == (4, 10 + 2 * 5)
    assert plan.pools[0].free_blocks == 100 - 1 - 4 - plan.pools[0].in_flight_blocks


def test_scalar_memory_holds_the_rows_that_are_named_and_no_more() -> None:
    """4,096 blocks a row are 16 KiB: 1 MiB holds 63 rows and what the kernel needs beside them, not 64."""
    plan = plan_kv_cache(layers((1, full())), num_blocks=4_097, max_model_len=65_536)
    group = plan.groups[0]
    assert (group.table_bytes, group.rows_in_scalar_memory) == (4 * 4_096, 63)
    for rows, fits in ((63, True), (64, False)):
        assert (rows * (group.table_bytes + 8) + KERNEL_SCALAR_BYTES <= SCALAR_MEMORY_BYTES) == fits


def test_context_ranks_shorten_the_tables() -> None:
    parallel = Parallelism(prefill_context=4)
    plan = plan_kv_cache(layers((1, full())), num_blocks=1_025, max_model_len=65_536, parallel=parallel)
    assert plan.groups[0].table_bytes == 4 * 1_024
