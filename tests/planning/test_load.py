"""Laws of the load that pools are balanced for."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.configs import load_model_config
from kvjax.core import MambaSpec
from kvjax.planning import CacheShape, KVCachePlan, Load, Parallelism, plan_kv_cache
from kvjax.planning.sizing import PoolNeed, bytes_for, size_pools
from tests.planning.test_plan import GIB, full, layers, window

STATE = MambaSpec(block_size=64, shapes=((64, 512),), dtypes=("float32",), mamba_cache_mode="align")
SPECS = layers((4, full()), (12, STATE))
TYPED = ("qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "jamba-1.5-mini", "deepseek-v4-flash")


def plan_of(load: Load | None = None, **arguments: Any) -> KVCachePlan:
    given = {"memory_bytes": GIB, "max_model_len": 4_096, "max_in_flight_tokens": 512} | arguments
    return plan_kv_cache(SPECS, load=load, **given)


NEEDS = st.builds(
    PoolNeed,
    bytes_per_block=st.integers(1, 50),
    request_blocks=st.integers(1, 6),
    in_flight_blocks=st.integers(0, 3),
    reserved_blocks=st.integers(0, 2),
    least_blocks=st.integers(0, 40),
    kept_blocks=st.integers(1, 6),
)


@given(
    needs=st.lists(NEEDS, min_size=1, max_size=4),
    most=st.one_of(st.none(), st.integers(1, 5)),
    budget=st.integers(0, 1_500),
)
def test_pools_hold_the_most_requests_that_the_budget_pays(
    needs: list[PoolNeed], most: int | None, budget: int
) -> None:
    """By its definition: the last `most` hold what runs, those before them what they left; counted in 60ths."""
    needs = [PoolNeed(**vars(need) | {"max_running": most}) for need in needs]

    def blocks(need: PoolNeed, sixtieths: int) -> int:
        running = sixtieths if most is None else min(sixtieths, 60 * most)
        held = running * need.request_blocks + (sixtieths - running) * need.kept_blocks
        return max(1 + need.reserved_blocks + need.in_flight_blocks + -(-held // 60), need.least_blocks)

    def paid(sixtieths: int) -> bool:
        return sum(need.bytes_per_block * blocks(need, sixtieths) for need in needs) <= budget

    if not paid(0):
        with pytest.raises(ValueError, match="bytes short"):
            size_pools(needs, budget)
        return
    sizes = size_pools(needs, budget)
    assert sum(need.bytes_per_block * size for need, size in zip(needs, sizes, strict=True)) <= budget
    # 60 is a multiple of all that a request holds or leaves, so requests step by 60ths.
    requests = next(count for count in range(60 * 1_600) if not paid(count + 1))
    assert all(size >= blocks(need, requests) for need, size in zip(needs, sizes, strict=True))
    assert bytes_for(needs, Fraction(requests, 60)) <= budget < bytes_for(needs, Fraction(requests + 1, 60))


@pytest.mark.parametrize("tokens", [100, 130, 512, 2_048])
def test_a_load_keeps_as_many_tokens_a_checkpoint_as_it_says(tokens: int) -> None:
    """Whether or not it is a number of whole blocks."""
    kept = plan_of(Load(tokens, max_running=1), memory_bytes=16 * GIB).kept
    assert kept.tokens / kept.checkpoints == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("tokens", [128, 512, 2_048])
def test_a_running_request_holds_a_state_more(tokens: int) -> None:
    more = plan_of(Load(tokens, max_running=20)).kept
    assert more.checkpoints - more.tokens / tokens == pytest.approx(20, abs=1.1)


def test_fewer_tokens_a_checkpoint_keep_more_checkpoints() -> None:
    kept = [plan_of(Load(tokens)).kept for tokens in (64, 256, 1_024, 4_096)]
    assert [one.checkpoints for one in kept] == sorted((one.checkpoints for one in kept), reverse=True)
    assert [one.tokens for one in kept] == sorted(one.tokens for one in kept)


@pytest.mark.parametrize("model", TYPED)
def test_the_usual_load_serves_shorter_requests_than_the_longest(model: str) -> None:
    """The default keeps several times the checkpoints of a plan for longest requests, and one of these always fits."""
    specs = load_model_config(model).kv_cache_specs()
    arguments: dict[str, Any] = {"memory_bytes": 60 * GIB, "max_model_len": 131_072, "platform": "gpu"}
    usual, longest = plan_kv_cache(specs, **arguments), plan_kv_cache(specs, request_len=131_072, **arguments)
    assert usual.load == Load()
    assert usual.kept.checkpoints > 5 * longest.kept.checkpoints
    assert usual.concurrency >= 1
    assert max(usual.used_bytes, longest.used_bytes) <= 60 * GIB
    assert usual.balanced_for(longest.load).config == longest.config


def test_nothing_is_refused_that_holds_one_longest_request() -> None:
    """Whatever the load; and one byte less is refused whatever the load."""
    shape = CacheShape.of(SPECS, platform="cpu", parallel=Parallelism())
    least = bytes_for(shape.needs(4_096, 4_096, 512), Fraction(0))
    for load in (Load(1), Load(), Load(4_096, max_running=None)):
        assert plan_of(load, memory_bytes=least).concurrency >= 1
        with pytest.raises(ValueError, match="1 bytes short"):
            plan_of(load, memory_bytes=least - 1)


def test_tokens_in_flight_come_on_top_of_what_is_kept() -> None:
    """A step of 2,048 tokens takes no checkpoint's blocks, however short the usual request is."""
    specs = layers((4, full()), (40, window(size=16, num_kv_heads=1)))
    plan = plan_kv_cache(specs, memory_bytes=GIB, max_model_len=8_192, max_in_flight_tokens=2_048, load=Load(64))
    windows = plan.pools[1]
    assert windows.num_blocks >= 1 + 2_048 // 16 + plan.kept.checkpoints
    assert plan.kept.checkpoints > 100


def test_bad_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tokens_per_checkpoint >= 1, got 0"):
        Load(0)
    with pytest.raises(ValueError, match="expected max_running >= 1, got 0"):
        Load(max_running=0)
    with pytest.raises(ValueError, match="expected request_len or load, got both: 64 and Load"):
        plan_of(Load(), request_len=64)
    with pytest.raises(ValueError, match="expected a plan of memory_bytes to balance, got one of num_blocks"):
        plan_of(memory_bytes=None, num_blocks=2_000).balanced_for(Load())
